"""`edgellm serve`: an HTTP server around AsyncLLM that speaks as OpenAI, Anthropic and Ollama do
(extra `server`)."""
