"""`edgellm serve`: an OpenAI-style HTTP server around AsyncLLM (extra `server`)."""
