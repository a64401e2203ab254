"""Hugging Face directories to GGUF files: `edgellm convert`, `edgellm convert-lora`.

checkpoint reads the directory, architectures says how a model's configuration and tensors differ,
tensors and tokenizer make a plan of what the file will hold, and model streams it out.
"""
