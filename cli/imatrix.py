"""edgellm imatrix: which columns of a model's matrices matter on a text."""

import os
from typing import Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._options import (
    Chunks,
    ChunkSize,
    CpuMask,
    Force,
    Model,
    ModelFlag,
    TextFile,
    Threads,
    threads_or_none,
)
from edgellm.cli._output import Status, say, write


def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    file: TextFile = None,
    out: Annotated[
        str, typer.Option("-o", "--output", "--output-file", metavar="FILE",
                          help="The file to write.")
    ] = "imatrix.gguf",
    ctx_size: ChunkSize = 512,
    chunks: Chunks = -1,
    process_output: Annotated[
        bool, typer.Option("--process-output", help="The output matrix too.")
    ] = False,
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    force: Force = False,
) -> None:  # fmt: skip
    """Measure the mean squared inputs of every matrix over a text, for `quantize --imatrix`, here
    or in llama.cpp.

    \b
    The text should look like what the model will be used for; some 100 chunks are enough. Example:
      edgellm imatrix model-f16.gguf -f calibration.txt -o imatrix.gguf
    """
    from edgellm.cli.run import text_of
    from edgellm.quant.writer import refuse_existing

    refuse_existing(out, force)
    text = text_of(file)
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm.evaluation.importance import measure
    from edgellm.evaluation.text import cut
    from edgellm.llm import LLM

    status = Status()
    try:
        with LLM(
            path, n_ctx=ctx_size, n_threads=threads_or_none(threads), cpu_mask=cpu_mask,
            max_num_seqs=1, n_gpu_layers=0, progress=status,
        ) as llm:  # fmt: skip
            read = cut(llm, text, ctx_size, None if chunks == -1 else chunks)
            found = measure(
                llm, read, os.path.basename(file or "stdin"), process_output,
                lambda done: status(f"{done}/{read.n_chunks} chunks"),
            )  # fmt: skip
    finally:
        status.clear()
    found.write(out, force=force)
    say(f"{len(found.sums)} matrices over {read.n_chunks} chunks of {read.n_ctx} tokens.")
    write(out + "\n")
