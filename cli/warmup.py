"""edgellm warmup: compile ahead of the first use."""

from edgellm.cli import _model
from edgellm.cli._options import (
    CacheTypeK,
    CacheTypeV,
    CtxSize,
    Model,
    ModelFlag,
    Threads,
    threads_or_none,
)
from edgellm.cli._output import Status


def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    ctx_size: CtxSize = 0,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    threads: Threads = -1,
) -> None:
    """Fetch a model if need be and compile all kernels it uses, so that later starts are quick."""
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm.llm import LLM

    status = Status()
    n_threads = threads_or_none(threads)
    try:
        llm = LLM(
            path, n_ctx=ctx_size or None, n_threads=n_threads, max_num_seqs=1,
            type_k=cache_type_k, type_v=cache_type_v, progress=status,
        )  # fmt: skip
    finally:
        status.clear()
    with llm:
        stats = llm.kernel_stats
    print(
        f"{stats['compiled']} kernels compiled, {stats['loaded']} loaded from the store "
        f"in {stats['seconds']:.2f} s."
    )
