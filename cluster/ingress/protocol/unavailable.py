"""Parameters that clients of other servers send and this one can't honour (yet): refused unless they ask for nothing.

Each entry lists the values that mean "nothing special"; with those the parameter is dropped, with any other the request
is refused by name. A parameter that neither a table nor a model knows is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.ingress.errors import invalid

Neutral = Mapping[str, tuple[Any, ...]]

COMMON: Neutral = {
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
}

CHAT: Neutral = {
    **COMMON,
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

COMPLETION: Neutral = {**COMMON, "suffix": ("",)}

MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def drop_neutral(body: dict[str, Any], unavailable: Neutral, path: str = "") -> dict[str, Any]:
    """`body` without the parameters that ask for nothing (null always does).

    Raises:
        ApiError: 400 naming a parameter whose effect is not available.
    """
    kept = {}
    for name, value in body.items():
        neutral = unavailable.get(name)
        if neutral is None:
            kept[name] = value
        elif value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise invalid(path + name, "not available on this server; leave it out")
    return kept
