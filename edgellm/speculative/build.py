"""From options to speculation on a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.context import Beside
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cpu.cores import allowed_cpus, cores_of, parse_mask, performance_cpus
from edgellm.kernels.cpu.kv_types import BLOCK
from edgellm.memory import bill
from edgellm.offload import OffloadError, Options
from edgellm.quant.gguf import GGUF
from edgellm.speculative.cores import Division, Share, divide
from edgellm.speculative.lookup import Lookup
from edgellm.speculative.options import SpeculationOptions
from edgellm.speculative.proposer import Proposer
from edgellm.speculative.speculation import Speculation
from edgellm.speculative.vocabulary import check_vocabularies
from edgellm.step_time import StepTime

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.speculative.drafter import Drafter


def beside(options: SpeculationOptions) -> Beside | None:
    """Memory that a draft model will need: its keys and values have room for as many tokens as the
    target's."""
    if not options.uses_model:
        return None
    try:
        with GGUF(str(options.model)) as file:
            costs = bill(file, None, options.type_k, options.type_v)
    except EdgeLLMError as error:
        raise EdgeLLMError(f"Draft model (-md): {error}") from None
    return Beside(costs.weights + costs.arena, costs.kv_per_token)


def target_share(options: SpeculationOptions, share: Share, is_asked: bool) -> Share:
    """What is left of the cores for the target, which is not loaded yet and wants ``share``."""
    return _divide(options, share, is_asked, False).target if options.uses_model else share


def _divide(
    options: SpeculationOptions, target: Share, is_asked: bool, is_on_gpu: bool
) -> Division:
    cores = sorted(set(cores_of(performance_cpus(allowed_cpus())).values()))
    draft_cpus = tuple(parse_mask(options.cores, "--draft-cores")) if options.cores else ()
    return divide(cores, target, is_asked, is_on_gpu, options.n_threads, draft_cpus)


def build(llm: LLM, options: SpeculationOptions, step_time: StepTime) -> Speculation | None:
    """None where nothing is to be guessed."""
    proposers: list[Proposer] = []
    if options.uses_lookup:
        proposers.append(Lookup())
    if options.uses_model:
        proposers.append(_draft_model(llm, options))
    if not proposers:
        return None
    return Speculation(
        proposers, options, step_time, llm.max_positions, llm.metrics.speculation,
        llm.graph.is_recurrent,
    )  # fmt: skip


def _draft_model(llm: LLM, options: SpeculationOptions) -> Proposer:
    from edgellm.speculative.ahead import LINES, DraftAhead
    from edgellm.speculative.draft_model import DraftModel

    is_on_gpu = not llm.placement.plan.uses_cpu
    target = Share(llm.n_threads, llm.cpus)
    division = _divide(options, target, llm.is_threads_asked, is_on_gpu)
    drafter = load_drafter(llm, options, division.draft, LINES if division.is_apart else 1)
    if division.is_apart:
        n = len(division.draft.cpus)
        cores = "a core" if n == 1 else f"{n} cores"
        llm.notices.append(f"The draft model writes ahead on {cores} of its own.")
        return DraftAhead(drafter)
    return DraftModel(drafter)


def load_drafter(llm: LLM, options: SpeculationOptions, share: Share, n_lines: int) -> Drafter:
    """The draft model, with its own cache and threads. EdgeLLMError if it cannot guess for ``llm``,
    of whose sequences each has up to ``n_lines``."""
    from edgellm.llm import LLM
    from edgellm.speculative.drafter import Drafter

    assert options.model is not None
    own = Options(n_gpu_layers=options.n_gpu_layers, fit_margin=llm.offload_options.fit_margin)
    n_ends = (
        2 * BLOCK * n_lines * llm.max_num_seqs
    )  # where lines part they hold blocks of their own
    try:
        draft = LLM(
            options.model, n_ctx=llm.n_ctx, n_threads=share.n_threads,
            cpu_mask=sum(1 << cpu for cpu in share.cpus) or None,
            max_num_seqs=llm.max_num_seqs * n_lines, type_k=options.type_k, type_v=options.type_v,
            offload=own, cache_tokens=llm.cache_tokens + n_ends,
        )  # fmt: skip
    except OffloadError as error:  # it names flags of the target
        raise OffloadError(f"Draft model (-md, -ngld): {error}") from None
    except EdgeLLMError as error:
        raise EdgeLLMError(f"Draft model (-md): {error}") from None
    try:
        if draft.graph.is_recurrent:
            raise EdgeLLMError(
                f"{options.model} has recurrent layers, which cannot go back to where a guess was "
                "wrong: it cannot be a draft model (-md)."
            )
        if draft.is_encoder:
            raise EdgeLLMError(
                f"{options.model} makes embeddings: it cannot be a draft model (-md)."
            )
        check_vocabularies(llm.metadata, draft.metadata, llm.n_vocab, draft.n_vocab)
        drafter = Drafter(draft, llm.n_vocab, options.p_min)
        drafter.measure()
    except BaseException:
        draft.close()
        raise
    llm.notices += [f"Of the draft model: {note}" for note in draft.placement.plan.notes]
    return drafter
