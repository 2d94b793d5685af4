"""Record the tools and calls that LLaMA-Factory writes: ``python record_tool_formats.py llamafactory/data/tool_utils.py``.

The module is loaded alone, from its file. Its version is 0.9.5.
"""

import importlib.util
import json
import sys
from pathlib import Path

from tool_cases import CALLS, TOOLS

EXPECTED = Path(__file__).parent / "expected" / "tool_formats.json"


def main() -> None:
    spec = importlib.util.spec_from_file_location("tool_utils", sys.argv[1])
    tool_utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool_utils)
    utils = tool_utils.TOOLS["default"]
    calls = {
        case: utils.function_formatter(
            [
                tool_utils.FunctionCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False))
                for call in listed
            ]
        )
        for case, listed in CALLS.items()
    }
    recorded = {"tools": {case: utils.tool_formatter(tools) for case, tools in TOOLS.items()}, "calls": calls}
    EXPECTED.write_text(json.dumps(recorded, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
