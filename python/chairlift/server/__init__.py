"""The OpenAI-compatible HTTP server: FastAPI's routes, our own path for what is streamed.

The way of a request: :mod:`.app` routes it, :mod:`.exchange` reads, authorises and watches it,
:mod:`.protocol` says what it may ask for, :mod:`.chat` and :mod:`.completions` turn it into streams
of the engine and those into an answer, :mod:`.sse` writes the chunks, :mod:`.errors` every refusal.
"""
