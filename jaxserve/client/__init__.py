"""A Python client of a jaxserve server over gRPC (`jaxserve.v1`): text in, text out; imports no JAX.

    from jaxserve.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=16).text)
        for piece in client.chat_stream([{"role": "user", "content": "Hello"}]):
            print(piece.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Errors are those of `jaxserve.errors`. Next: `calls`, what both share; `answers`, what they return.
"""

from jaxserve.client.answers import Answer, Output, Piece, Token, TokenLogprob, Usage
from jaxserve.client.async_client import AsyncClient
from jaxserve.client.blocking_client import Client

__all__ = ["Answer", "AsyncClient", "Client", "Output", "Piece", "Token", "TokenLogprob", "Usage"]
