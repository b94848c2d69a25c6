"""Many streams at once: they share one connection, and the workers batch them."""

import asyncio

from tokenmill import AsyncClient

PROMPTS = ["Roses are", "The sea is", "To be or"]


async def follow(client: AsyncClient, prompt: str) -> str:
    text = prompt
    async with client.stream(prompt, max_tokens=16) as stream:
        async for delta in stream:
            text += delta
    return text


async def main() -> None:
    async with AsyncClient() as client:
        for text in await asyncio.gather(*(follow(client, prompt) for prompt in PROMPTS)):
            print(text)


asyncio.run(main())
