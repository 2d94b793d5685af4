"""Records with the columns of TRL's own test data sets: zen, harmony and toolcall.

The texts differ from TRL's, the columns, roles and keys are the same.
"""

from typing import Any

from peers.cases import Case

# Beginning, end, and an end that is worse. Some ends begin with a space, some inside a word.
SENTENCES = [
    ("Rivers run to", " the sea.", " the moon."),
    ("Ice is", " colder than water.", " warmer than fire."),
    ("Bread", " is made of flour.", " is optional."),
    ("An apple a day keeps the doctor", " away.", " awake -- or not."),
    ("If the key is lost,", " it's a good idea to knock.", " it's clearly time to run."),
    ("Never count", "ing sheep in *broad* daylight.", "er a pawn, ça va?"),
    ("日本", "語は難しい。", "茶は熱い 😀"),
]
QUESTIONS = [
    ("What runs to the sea?", "Rivers.", "Roads."),
    ("What is colder than water?", "Ice.", "Very warm ice."),
    ("What is bread made of?", "It's made of flour.", "Yes, often."),
    ("Who is kept away by apples?", "The doctor, and preferably only the doctor.", "No, never."),
    ("Ça va?", "Oui, très bien 😀", "Non."),
]
LABELS = [True, False, False, True, True, False, True]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields, "content": text}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content}


def tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    returned = {"type": "string", "description": "What happened."}
    function = {"name": name, "description": f"Does {name}.", "parameters": schema, "return": returned}
    return {"type": "function", "function": function}


TIMER = tool("start_timer", duration="integer")
CLOCK = tool("get_current_time", location="string")
WEATHER = tool("get_weather_forecast", city="string", date="string")
MUSIC = tool("play_music", title="string", artist="string")
TOOL_CALLS = [
    (
        user("Set a timer for 10 minutes."),
        [call("start_timer", duration=600), result("start_timer", "600"), assistant("Timer set for 10 minutes.")],
        [call("start_timer", duration=10), result("start_timer", "10"), assistant("Timer set for 10 seconds.")],
        [TIMER, MUSIC],
    ),
    (
        user("What time is it in Zürich?"),
        [
            call("get_current_time", location="Zürich"),
            result("get_current_time", "06:22:48"),
            assistant("It is 06:22 in Zürich."),
        ],
        [assistant("It is noon.")],
        [CLOCK],
    ),
    (
        user("How will the weather be in Rome?"),
        [
            call("get_weather_forecast", city="Rome", date="2025-06-16"),
            result("get_weather_forecast", "{'temperature': 22, 'condition': 'partly cloudy'}"),
            assistant("Partly cloudy, 22°C."),
        ],
        [assistant("Hot.")],
        [WEATHER, CLOCK, TIMER],
    ),
]
THOUGHTS = ["Water flows down.", "Ice is frozen water.", "Bakers know.", "It is a proverb.", "On parle français."]
HARMONY_ARGUMENTS = [
    {"reasoning_effort": effort, "model_identity": "You are Tiny, a tiny language model."}
    for effort in ("low", "medium", "high", "low", "medium")
]
THINKING = [
    ([user(question)], [assistant(good, thinking=thought)], [assistant(bad, thinking="I guess.")], arguments)
    for (question, good, bad), thought, arguments in zip(QUESTIONS, THOUGHTS, HARMONY_ARGUMENTS, strict=True)
]
ASSISTANT_ONLY = {"assistant_only_loss": True}
ALL = {"train_on": "all"}
RAW = {"template": "none"}
AS_PROMPTS = {"prompts": True}

CASES = [
    Case("standard_language_modeling", [{"text": start + end} for start, end, _ in SENTENCES]),
    Case(
        "standard_prompt_completion",
        [{"prompt": start, "completion": end} for start, end, _ in SENTENCES],
        settings=RAW,
    ),
    Case(
        "standard_preference",
        [{"prompt": start, "chosen": end, "rejected": bad} for start, end, bad in SENTENCES],
        "pairs",
        settings=RAW,
    ),
    Case(
        "standard_implicit_prompt_preference",
        [{"chosen": start + end, "rejected": start + bad} for start, end, bad in SENTENCES],
        "pairs",
    ),
    Case(
        "standard_unpaired_preference",
        [
            {"prompt": start, "completion": end if label else bad, "label": label}
            for (start, end, bad), label in zip(SENTENCES, LABELS, strict=True)
        ],
        "labels",
        settings=RAW,
    ),
    Case(
        "standard_prompt_only",
        [{"prompt": start} for start, _, _ in SENTENCES],
        "prompts",
        settings=AS_PROMPTS,
        differs="text prompts",
    ),
    Case(
        "conversational_language_modeling",
        [{"messages": [user(question), assistant(good)]} for question, good, _ in QUESTIONS],
        settings=ALL,
    ),
    Case(
        "conversational_language_modeling, assistant_only_loss",
        [{"messages": [user(question), assistant(good)]} for question, good, _ in QUESTIONS],
        peer=ASSISTANT_ONLY,
    ),
    Case(
        "conversations (from: user)",
        [
            {"conversations": [{"from": "user", "value": question}, {"from": "assistant", "value": good}]}
            for question, good, _ in QUESTIONS
        ],
        settings=ALL,
    ),
    Case(
        "conversations (from: human)",
        [
            {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": good}]}
            for question, good, _ in QUESTIONS
        ],
        settings=ALL,
        differs="sender names",
    ),
    Case(
        "conversational_prompt_completion",
        [{"prompt": [user(question)], "completion": [assistant(good)]} for question, good, _ in QUESTIONS],
    ),
    Case(
        "conversational_language_modeling, max_length",
        [{"messages": [user(question), assistant(good)]} for question, good, _ in QUESTIONS],
        peer={"max_length": 17},
        settings={**ALL, "max_tokens": 17, "overlong": "truncate"},
    ),
    Case(
        "conversational_language_modeling, max_length, keep_end",
        [{"messages": [user(question), assistant(good)]} for question, good, _ in QUESTIONS],
        peer={"max_length": 17, "truncation_mode": "keep_end"},
        settings={**ALL, "max_tokens": 17, "overlong": "truncate-left"},
    ),
    Case(
        "conversational_preference",
        [
            {"prompt": [user(question)], "chosen": [assistant(good)], "rejected": [assistant(bad)]}
            for question, good, bad in QUESTIONS
        ],
        "pairs",
    ),
    Case(
        "conversational_implicit_prompt_preference",
        [
            {"chosen": [user(question), assistant(good)], "rejected": [user(question), assistant(bad)]}
            for question, good, bad in QUESTIONS
        ],
        "pairs",
    ),
    Case(
        "conversational_unpaired_preference",
        [
            {"prompt": [user(question)], "completion": [assistant(good if label else bad)], "label": label}
            for (question, good, bad), label in zip(QUESTIONS, LABELS, strict=False)
        ],
        "labels",
    ),
    Case(
        "conversational_prompt_only",
        [{"prompt": [user(question)]} for question, _, _ in QUESTIONS],
        "prompts",
        settings=AS_PROMPTS,
    ),
    Case(
        "toolcall language_modeling",
        [{"messages": [prompt, *good], "tools": tools} for prompt, good, _, tools in TOOL_CALLS],
        settings=ALL,
    ),
    Case(
        "toolcall language_modeling, assistant_only_loss",
        [{"messages": [prompt, *good], "tools": tools} for prompt, good, _, tools in TOOL_CALLS],
        peer=ASSISTANT_ONLY,
    ),
    Case(
        "toolcall preference",
        [
            {"prompt": [prompt], "chosen": good, "rejected": bad, "tools": tools}
            for prompt, good, bad, tools in TOOL_CALLS
        ],
        "pairs",
    ),
    Case(
        "harmony language_modeling",
        [{"messages": prompt + good, "chat_template_kwargs": arguments} for prompt, good, _, arguments in THINKING],
        settings=ALL,
    ),
    Case(
        "harmony prompt_completion",
        [
            {"prompt": prompt, "completion": good, "chat_template_kwargs": arguments}
            for prompt, good, _, arguments in THINKING
        ],
    ),
    Case(
        "harmony preference",
        [
            {"prompt": prompt, "chosen": good, "rejected": bad, "chat_template_kwargs": arguments}
            for prompt, good, bad, arguments in THINKING
        ],
        "pairs",
    ),
]
