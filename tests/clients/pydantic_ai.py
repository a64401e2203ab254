"""pydantic-ai: text, stream, validated output."""

import asyncio
import sys

# this file is called as the package is
sys.path.pop(0)

from pydantic import BaseModel  # noqa: E402
from pydantic_ai import Agent, NativeOutput  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402


class Person(BaseModel):
    name: str
    age: int


url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
settings = {"max_tokens": 200, "seed": 1}


async def main() -> None:
    agent = Agent(model, model_settings=settings)
    whole = await agent.run("Say hello.")
    assert whole.output
    async with agent.run_stream("Say hello.") as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)])
    typed = Agent(model, output_type=NativeOutput(Person), model_settings=settings)
    assert isinstance((await typed.run("Name a person.")).output, Person)


asyncio.run(main())
print("ok")
