"""`reasoning_effort`: how much a model is to think, in the words of its template or as a limit."""

from __future__ import annotations

from typing import Any

from edgellm.server.schemas import ChatRequest

# What templates that know efforts (gpt-oss's) call them.
_NAMES = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high",
          "max": "high"}  # fmt: skip
# For those that do not: tokens of thinking; without a limit above these.
_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096}


def with_effort(body: ChatRequest, template: str) -> ChatRequest:
    """The request with its effort as variables of the template and a limit on thinking; what it
    says itself of either stays."""
    effort = body.reasoning_effort
    if effort is None:
        return body
    variables: dict[str, Any] = {"enable_thinking": effort != "none"}
    budget = 0 if effort == "none" else None
    if "reasoning_effort" in template:
        variables["reasoning_effort"] = _NAMES.get(effort, "low")
    elif budget is None:
        budget = _BUDGETS.get(effort)
    if body.reasoning_budget is not None:
        budget = body.reasoning_budget
    variables |= body.chat_template_kwargs or {}
    return body.model_copy(update={"chat_template_kwargs": variables, "reasoning_budget": budget})
