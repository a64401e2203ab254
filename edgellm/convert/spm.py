"""SentencePiece vocabularies (tokenizer.model), read through the library's own message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from edgellm.convert.errors import ConvertError
from edgellm.convert.vocabulary import Tokens

_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type


def sentencepiece(path: Path) -> Tokens:
    """tokenizer.ggml.model "llama" for byte pairs, "t5" for unigrams. The kinds of pieces have the
    numbers that GGUF has."""
    messages: Any = sentencepiece_model_pb2  # its classes appear at run time
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's class moves between its versions
        raise ConvertError(f"{path}: is no SentencePiece model: {error}.") from None
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE) or not proto.pieces:
        raise ConvertError(f"{path}: must be a SentencePiece model of kind unigram or bpe.")
    more: dict[str, Any] = {
        "add_space_prefix": bool(normalizer.add_dummy_prefix),
        "remove_extra_whitespaces": bool(normalizer.remove_extra_whitespaces),
    }
    if normalizer.precompiled_charsmap:
        charsmap = np.frombuffer(normalizer.precompiled_charsmap, np.uint8)
        more["precompiled_charsmap"] = charsmap
    for name in ("unk", "bos", "eos", "pad"):
        token = int(getattr(trainer, f"{name}_id"))
        if 0 <= token < len(proto.pieces):
            more[f"{_KEYS.get(name, name)}_token_id"] = token
    return Tokens(
        path,
        "llama" if trainer.model_type == _BPE else "t5",
        [piece.piece.encode() for piece in proto.pieces],
        [int(piece.type) for piece in proto.pieces],
        [float(piece.score) for piece in proto.pieces],
        more,
    )


_KEYS = {"unk": "unknown", "pad": "padding"}
