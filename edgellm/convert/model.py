"""A whole model: what the file will hold, and the writing of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.convert import outtype as types
from edgellm.convert.architectures import TABLE, Architecture, common, rotated, row_of
from edgellm.convert.checkpoint import Checkpoint, read_json
from edgellm.convert.config import HFConfig
from edgellm.convert.errors import ConvertError, reading
from edgellm.convert.rope import Tables, rope_metadata
from edgellm.convert.tensors import Planned, plan
from edgellm.convert.tokenizer import tokenizer_metadata
from edgellm.gguf_files import Counter, Progress, refuse_read
from edgellm.kernels.cpu.convert import Converter
from edgellm.kernels.cpu.cores import default_threads
from edgellm.models import build_graph
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.quant.recipes import MIXES, QUANTIZATION_VERSION
from edgellm.quant.values import encode
from edgellm.quant.writer import NewTensor, Writer, refuse_existing
from edgellm.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def read_config(folder: Path) -> tuple[Architecture, HFConfig]:
    """The row and the fields of a directory's config.json."""
    path = folder / "config.json"
    values = read_json(path)
    row = row_of(values)
    if row is None:
        names, known = values.get("architectures"), ", ".join(sorted(TABLE))
        raise ConvertError(f"{path}: architectures is {names!r}; supported: {known}.")
    if method := values.get("quantization_config"):
        kind = method.get("quant_method") if isinstance(method, dict) else method
        raise ConvertError(
            f"{path}: the model is quantized ({kind}); take the unquantized one and choose a type."
        )
    return row, HFConfig(path, values, row.defaults, row.names)


def convert_model(
    folder: str | os.PathLike[str], target: str | os.PathLike[str] | None = None, *,
    outtype: str = "auto", n_threads: int | None = None, force: bool = False,
    progress: Progress | None = None,
) -> Path:  # fmt: skip
    """Write a GGUF file of a Hugging Face directory and return its path, by default NAME-TYPE.gguf
    in that directory. ConvertError and GGUFError name the file and the field of any refusal.

    Memory holds one tensor of the checkpoint at a time, twice where its rows are reordered.
    """
    checkpoint = Checkpoint(folder)
    row, config = read_config(checkpoint.folder)
    tensors = plan(checkpoint.tensors, row, config)
    outtype = types.resolve(outtype, tensors)
    name = model_name(checkpoint.folder)
    if target is None:
        target = checkpoint.folder / f"{name}-{outtype.upper()}.gguf"
    refuse_read(checkpoint.files(), os.fspath(target))
    refuse_existing(os.fspath(target), force)
    rows = [tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight"]
    if not rows:
        raise ConvertError(f"{checkpoint.folder}: the model has no table of embeddings.")
    keys, tables = _model_metadata(row, config)
    keys |= _pooling(checkpoint)
    metadata: dict[str, Any] = {
        "general.architecture": row.name,
        "general.type": "model",
        "general.name": name,
        "general.file_type": MIXES[outtype.upper()].file_type,
        "general.quantization_version": QUANTIZATION_VERSION,
        **{f"{row.name}.{key}": value for key, value in keys.items()},
        f"{row.name}.vocab_size": rows[0],
        **tokenizer_metadata(checkpoint, rows[0]),
    }
    with reading(config.path):
        encoded = {key: encode(_as_array(value)) for key, value in metadata.items()}
    f32 = by_name("f32")
    new = [NewTensor(name, table.shape, f32) for name, table in tables.items()]
    new += [types.new_tensor(tensor, outtype) for tensor in tensors]
    tell = Counter(sum(tensor.n_bytes for tensor in new), progress)
    with (
        Converter(n_threads or default_threads()) as converter,
        Writer(target, encoded, new, force=force) as out,
    ):
        for table in tables.values():
            out.write(table)
            tell(table.nbytes)
        write_tensors(out, tensors, new[len(tables) :], converter, tell)
        _check(out)
    return Path(target)


def write_tensors(
    out: Writer, tensors: list[Planned], new: list[NewTensor], converter: Converter, tell: Counter
) -> None:  # fmt: skip
    """All tensors, each as the type it is to have."""
    for tensor, stored in zip(tensors, new, strict=True):
        for piece in types.data(tensor, stored.type, converter):
            out.write(piece)
            tell(piece.nbytes)


def _check(out: Writer) -> None:
    """That what was written can be run, all of it, before it gets its name."""
    try:
        with GGUF(out.partial) as made:
            _, graph = build_graph(made)
            Tokenizer.from_gguf(made).encode("a")
            read = {weight.name for op in graph.ops for weight in op.weights.values()}
            if unread := made.tensors.keys() - read:
                raise ConvertError(
                    f"{out.path}: tensor {min(unread)} is not read by {made.architecture} models; "
                    "without it the model would compute something else."
                )
    except GGUFError as error:
        raise GGUFError(out.path, 0, error.field, error.reason) from None


def _model_metadata(row: Architecture, config: HFConfig) -> tuple[dict[str, Any], Tables]:
    keys = common(config, row)
    if row.name not in ("gemma2", "gemma3", "cohere2", "phi3") and "sliding_window" in config:
        if config.get("use_sliding_window") is not False:
            log.warning(
                "%s: sliding_window is not kept: in files of %s all layers see everything",
                config.path, row.name,
            )  # fmt: skip
    if not row.has_rope:
        return keys, {}
    dim = rotated(config)
    rope, tables = rope_metadata(config, dim)
    return keys | {"rope.dimension_count": dim} | rope, tables


def _pooling(checkpoint: Checkpoint) -> dict[str, int]:
    """How sentence-transformers makes one vector of a text, where the directory says it."""
    path = checkpoint.folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return {}
    modes = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
    settings = read_json(path)
    found = [number for mode, number in modes.items() if settings.get(f"pooling_mode_{mode}")]
    if len(found) != 1:
        raise ConvertError(f"{path}: must choose one of pooling_mode_{', '.join(modes)}.")
    return {"pooling_type": found[0]}


def model_name(folder: Path) -> str:
    """The directory's name; in Hugging Face's cache, that of the repository."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def _as_array(value: Any) -> Any:
    """Lists of flags as arrays; lists of texts stay."""
    if isinstance(value, list) and value and isinstance(value[0], bool):
        return np.array(value, np.bool_)
    return value
