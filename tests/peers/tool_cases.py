"""Tools and calls that are written in every tool format."""

from typing import Any

TOOLS: dict[str, list[dict[str, Any]]] = {
    "wrapped": [
        {
            "type": "function",
            "function": {
                "name": "find",
                "description": "Find a café in “Zürich”.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "The city", "enum": ["Zürich", "Bern"]},
                        "tags": {"type": "array", "items": {"type": "string"}},
                        "n": {"type": "integer"},
                    },
                    "required": ["city"],
                },
            },
        }
    ],
    "bare": [
        {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
        {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "x"}}}},
    ],
}
CALLS: dict[str, list[dict[str, Any]]] = {
    "one": [{"name": "find", "arguments": {"city": "Zürich", "n": 3, "tags": ["a", 'b"c'], "open": True}}],
    "empty": [{"name": "now", "arguments": {}}],
    "two": [{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 0.5, "b": None, "c": {"d": "é"}}}],
}
