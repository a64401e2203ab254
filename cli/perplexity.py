"""edgellm perplexity: how well a model predicts a text."""

import json
from typing import Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._offload import OffloadFlags, with_offload
from edgellm.cli._options import (
    CacheTypeK,
    CacheTypeV,
    Chunks,
    ChunkSize,
    CpuMask,
    Model,
    ModelFlag,
    TextFile,
    Threads,
    threads_or_none,
)
from edgellm.cli._output import Status, say, visible, write


@with_offload
def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    file: TextFile = None,
    ctx_size: ChunkSize = 512,
    chunks: Chunks = -1,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    *,
    offload: OffloadFlags,
) -> None:
    """Measure the perplexity of a text, defined as by llama-perplexity: chunks of -c tokens, of
    which those behind the first half count.

    \b
    Example:
      edgellm perplexity model.gguf -f wiki.test.raw
    """
    from edgellm.cli.run import text_of

    text = text_of(file)
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm.evaluation.perplexity import Perplexity, perplexity
    from edgellm.evaluation.text import cut
    from edgellm.llm import LLM

    status = Status()
    try:
        with LLM(
            path, n_ctx=ctx_size, n_threads=threads_or_none(threads), cpu_mask=cpu_mask,
            max_num_seqs=1, type_k=cache_type_k, type_v=cache_type_v, offload=offload.options,
            progress=status,
        ) as llm:  # fmt: skip
            for notice in llm.notices:
                say(visible(notice))
            read = cut(llm, text, ctx_size, None if chunks == -1 else chunks)

            def progress(done: int, found: Perplexity) -> None:
                status(f"{done}/{read.n_chunks} chunks, perplexity so far {found.value:.4f}")

            found = perplexity(llm, read, progress)
    finally:
        status.clear()
    if as_json:
        facts = {"perplexity": found.value, "error": found.error, "tokens": found.n_tokens,
                 "chunks": read.n_chunks, "n_ctx": read.n_ctx}  # fmt: skip
        write(json.dumps(facts) + "\n")
    else:
        write(f"Final estimate: PPL = {found}\n")
