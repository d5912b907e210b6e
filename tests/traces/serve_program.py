"""Send requests to a gateway: ``python serve_program.py TRACEPARENT``. ``test_http.py`` runs it."""

from __future__ import annotations

import sys

import httpx

import sglrl

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


async def main() -> None:
    async with (
        sglrl.launch("tiny", engine="fake", vocab_size=512) as client,
        sglrl.serve(client, name="tiny") as gateway,
        gateway.session() as session,
        httpx.AsyncClient(timeout=300) as http,
    ):
        for url, headers in (
            (f"{gateway.url}/v1", {"traceparent": sys.argv[1]}),
            (session.base_url, {"authorization": f"Bearer {session.api_key}"}),
        ):
            answer = await http.post(f"{url}/chat/completions", json=BODY, headers=headers)
            answer.raise_for_status()


sglrl.run(main())
