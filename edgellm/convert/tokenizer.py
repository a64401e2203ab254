"""The tokenizer of a Hugging Face directory as metadata: vocabulary, special ids, templates."""

from __future__ import annotations

import logging
from typing import Any

from edgellm.convert import bpe, spm
from edgellm.convert.checkpoint import Checkpoint
from edgellm.convert.config import HFConfig
from edgellm.convert.errors import ConvertError, library, reading
from edgellm.convert.vocabulary import Tokens
from edgellm.convert.wordpiece import wordpiece
from edgellm.vocabulary import END_TEXTS

log = logging.getLogger(__name__)
_KEYS = {
    "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding",
    "sep": "seperator",  # as ggml spells it
    "cls": "cls", "mask": "mask",
}  # fmt: skip


def tokenizer_metadata(checkpoint: Checkpoint, n_rows: int) -> dict[str, Any]:
    """All of tokenizer.*. ``n_rows`` of the table of embeddings: as many tokens are written."""
    tokens, gguf = _vocabulary(checkpoint), library("gguf")
    with reading(checkpoint.folder / "tokenizer_config.json"):
        if len(tokens.texts) > n_rows:
            raise ConvertError(
                f"{tokens.path}: has {len(tokens.texts)} tokens, the model only {n_rows} rows of "
                "embeddings; the two are not of the same model."
            )
        for token, text, is_special in _added(checkpoint):
            if token < n_rows:
                tokens.add(token, text, is_special)
            else:  # of a larger model of the family
                log.warning("%s: the model has no row for token %r", checkpoint.folder, text)
        tokens.pad(n_rows)
        special = gguf.SpecialVocab(checkpoint.folder, n_vocab=n_rows)
        keys = tokens.metadata() | _special_ids(checkpoint, tokens, special)
        for name, value in special.add_special_token.items():
            if name in ("bos", "eos"):
                keys[f"tokenizer.ggml.add_{name}_token"] = value
        if tokens.model == "gpt2":  # what a missing key means differs between pre-tokenizers
            keys.setdefault("tokenizer.ggml.add_bos_token", False)
        prefix = checkpoint.json("tokenizer_config.json").get("add_prefix_space")
        if tokens.model == "llama" and isinstance(prefix, bool):
            keys["tokenizer.ggml.add_space_prefix"] = prefix
        return keys | _templates(_template_files(checkpoint) or special.chat_template)


def _vocabulary(checkpoint: Checkpoint) -> Tokens:
    path, model = checkpoint.folder / "tokenizer.json", checkpoint.folder / "tokenizer.model"
    tokenizer = checkpoint.json("tokenizer.json")
    with reading(path):
        if tokenizer and tokenizer["model"].get("type") == "WordPiece":
            n_types = checkpoint.json("config.json").get("type_vocab_size", 2)
            return wordpiece(path, tokenizer, int(n_types))
        if tokenizer and bpe.is_byte_level(tokenizer):
            return bpe.byte_level(path, tokenizer)
        if model.is_file():
            return spm.sentencepiece(model)
        if tokenizer:
            return bpe.spaces_marked(path, tokenizer)
    raise ConvertError(f"{checkpoint.folder}: has neither tokenizer.json nor tokenizer.model.")


def _added(checkpoint: Checkpoint) -> list[tuple[int, str, bool]]:
    """(id, text, is special) of the tokens added to the model's own."""
    found: dict[int, tuple[str, bool]] = {}
    for text, token in checkpoint.json("added_tokens.json").items():
        found[token] = (text, False)
    config = checkpoint.json("tokenizer_config.json").get("added_tokens_decoder") or {}
    listed = checkpoint.json("tokenizer.json").get("added_tokens") or []
    for token, fields in [*config.items(), *((entry.get("id"), entry) for entry in listed)]:
        found[int(token)] = (str(fields["content"]), bool(fields.get("special", False)))
    return [(token, text, special) for token, (text, special) in sorted(found.items())]


def _special_ids(checkpoint: Checkpoint, tokens: Tokens, special: Any) -> dict[str, Any]:
    """Ids by name: of tokenizer_config.json and special_tokens_map.json, else of config.json; an
    end that only generation_config.json or config.json have becomes eot."""
    ids: dict[str, int] = dict(special.special_token_ids)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        texts = checkpoint.json(name)
        for kind in _KEYS:
            value = texts.get(f"{kind}_token")
            text = value.get("content") if isinstance(value, dict) else value
            token = tokens.id_of(text) if isinstance(text, str) else None
            if token is not None:
                ids[kind] = token
    ends = checkpoint.json("generation_config.json").get("eos_token_id")
    if ends is None:  # older directories have no such file
        ends = HFConfig(checkpoint.folder, checkpoint.json("config.json")).get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if type(end) is not int or not 0 <= end < len(tokens.texts):
            continue
        # A text that is known for an end is found by runners; others need a key.
        known = tokens.texts[end].decode(errors="replace") in END_TEXTS
        if "eos" not in ids:
            ids["eos"] = end
        elif not known and end not in ids.values() and "eot" not in ids:
            ids["eot"] = end
    return {f"tokenizer.ggml.{_KEYS[k]}_token_id": ids[k] for k in _KEYS if k in ids}


def _template_files(checkpoint: Checkpoint) -> list[dict[str, str]]:
    """Templates in files of their own, which for the transformers package go before that of
    tokenizer_config.json."""
    main = checkpoint.folder / "chat_template.jinja"
    others = sorted((checkpoint.folder / "additional_chat_templates").glob("*.jinja"))
    named = [("default", main)] * main.is_file() + [(path.stem, path) for path in others]
    return [{"name": name, "template": path.read_text("utf-8")} for name, path in named]


def _templates(template: Any) -> dict[str, Any]:
    """One chat template, or several by name of which "default" is the usual one."""
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    keys: dict[str, Any] = {}
    others: list[str] = []
    for entry in template or []:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise ConvertError(f"tokenizer_config.json: chat_template has {entry!r}.")
        name = str(entry.get("name", "default"))
        if name == "default":
            keys["tokenizer.chat_template"] = entry["template"]
        else:
            others.append(name)
            keys[f"tokenizer.chat_template.{name}"] = entry["template"]
    if others:
        keys["tokenizer.chat_templates"] = others
    return keys
