"""Expected logits of small models from llama.cpp (needs llama-cpp-python): a development tool.

    python tests/oracle.py tests/data/arch/NAME.gguf ...

writes NAME.npz beside each file: ``tokens`` and ``logits``, or ``embeddings`` of an encoder, for
the dequantized float32 weights, with float32 keys and values and no flash attention. ``n_ctx`` is
the context that was used, which decides between LongRoPE's factors.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

N_TOKENS = 64


def expected(path: Path, tokens: NDArray[np.int32], n_ctx: int) -> NDArray[np.float32]:
    """float32 [n_tokens, n_vocab or n_embd] of one sequence from position 0."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "float32.gguf")
        _as_float32(path, whole)
        return _run(whole, tokens, n_ctx)


def _as_float32(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, arch)
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if entry.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, entry.contents())
        else:
            writer.add_key_value(key, entry.contents(), entry.types[0])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1]).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _run(path: Path, tokens: NDArray[np.int32], n_ctx: int) -> NDArray[np.float32]:
    lib: Any = llama_cpp
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path}: llama.cpp cannot load it.")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, len(tokens), len(tokens)
    params.type_k = params.type_v = 0
    params.flash_attn_type = 0
    is_encoder = not bool(lib.llama_model_has_decoder(model)) or b"bert" in _architecture(model)
    params.embeddings, params.pooling_type = is_encoder, 0
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
        batch.seq_id[i][0] = 0
    if lib.llama_decode(context, batch):
        raise SystemExit(f"{path}: llama.cpp cannot run it.")
    n = lib.llama_model_n_embd(model) if is_encoder else lib.llama_vocab_n_tokens(
        lib.llama_model_get_vocab(model))  # fmt: skip
    get = lib.llama_get_embeddings if is_encoder else lib.llama_get_logits
    rows = np.ctypeslib.as_array(get(context), (len(tokens), n)).copy()
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return rows


def _architecture(model: Any) -> bytes:
    import ctypes

    buffer = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", buffer, 64)
    return buffer.value


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        ids = np.random.default_rng(5).integers(0, 96, N_TOKENS).astype(np.int32)
        rows = expected(file, ids, 256)
        kind = "embeddings" if "bert" in file.name else "logits"
        np.savez_compressed(file.with_suffix(".npz"), tokens=ids, n_ctx=256, **{kind: rows})
