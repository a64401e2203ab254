"""langchain-openai: invoke, stream, tools, structured output."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "sun"


class Person(BaseModel):
    name: str
    age: int


url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=url, model=model, api_key="none", max_retries=0, max_tokens=200, seed=1)
whole = chat.invoke("Say hello.")
assert whole.content and whole.usage_metadata["output_tokens"] > 0
pieces = list(chat.stream("Say hello.", stream_usage=True))
assert "".join(piece.content for piece in pieces)
assert any(piece.usage_metadata for piece in pieces)
asked = chat.bind_tools([weather], tool_choice="required").invoke("The weather in Paris?")
assert asked.tool_calls[0]["name"] == "weather" and "city" in asked.tool_calls[0]["args"]
person = chat.with_structured_output(Person, method="json_schema").invoke("Name a person.")
assert isinstance(person, Person)
print("ok")
