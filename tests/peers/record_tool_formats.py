"""Record the tools and calls that LLaMA-Factory writes: ``python record_tool_formats.py llamafactory/data/tool_utils.py``.

The module is loaded alone, from its file. Its version is 0.9.5.
"""

import importlib.util
import json
import sys
from datetime import datetime
from pathlib import Path

from tool_cases import CALLS, TOOLS

EXPECTED = Path(__file__).parent / "expected" / "tool_formats.json"


def main() -> None:
    spec = importlib.util.spec_from_file_location("tool_utils", sys.argv[1])
    tool_utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool_utils)
    recorded = {}
    for name, utils in tool_utils.TOOLS.items():
        tools = {case: utils.tool_formatter(tools) for case, tools in TOOLS.items()}
        calls = {}
        for case, listed in CALLS.items():
            functions = [
                tool_utils.FunctionCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False))
                for call in listed
            ]
            try:
                calls[case] = utils.function_formatter(functions)
            except ValueError as error:
                calls[case] = {"error": str(error)}
        recorded[name] = {"tools": tools, "calls": calls}
    # The format llama3 writes the date of the day.
    text = json.dumps(recorded, ensure_ascii=False, indent=1).replace(
        f"{datetime.now().astimezone():%d %b %Y}", "<date>"
    )
    EXPECTED.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
