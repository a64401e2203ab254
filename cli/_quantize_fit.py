"""The part of `edgellm quantize` that measures which matrix needs how many bits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from edgellm.cli._output import Status, say, size

if TYPE_CHECKING:
    from edgellm.evaluation.fit import Fit
    from edgellm.quant.imatrix import ImportanceMatrix


def fitted(
    path: str, target_size: str | None, max_kld: float | None,
    text: tuple[str | None, int, int], matrix: "ImportanceMatrix | None",
    extra: Mapping[str, bytes], n_threads: int | None,
) -> "Fit":  # fmt: skip
    """``text``: the file, tokens of a chunk and number of chunks."""
    from edgellm.cli.run import text_of
    from edgellm.gguf_files import n_bytes_of

    if target_size is not None and max_kld is not None:
        raise typer.BadParameter("give it or --target-size", param_hint="'--max-kld'")
    wanted = None if target_size is None else n_bytes_of(target_size, "--target-size")
    file, n_ctx, n_chunks = text
    read = text_of(file)

    from edgellm.evaluation.fit import Fitter
    from edgellm.evaluation.text import cut
    from edgellm.llm import LLM

    status = Status()
    try:
        with LLM(path, n_ctx=n_ctx, n_threads=n_threads, max_num_seqs=1, n_gpu_layers=0,
                 progress=status) as llm:  # fmt: skip
            chunks = cut(llm, read, n_ctx, None if n_chunks == -1 else n_chunks)
            fitter = Fitter(
                llm, chunks, matrix, extra,
                lambda done, n: status(f"sensitivity: {done}/{n} matrices"),
            )  # fmt: skip
            status("choosing types")
            found = fitter.of_loss(max_kld or 0.0) if wanted is None else fitter.of_size(wanted)
    finally:
        status.clear()
    kinds = [str(kind) for kind in found.types.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    say(
        f"{size(found.n_bytes)} with {counts}; divergence {found.measured:.5f} nats (the sum of "
        f"single losses is {found.expected:.5f})."
    )
    return found
