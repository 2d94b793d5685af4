"""What a plain value is, in the words of a sentence for people."""

_KINDS = {
    dict: "an object",
    list: "an array",
    tuple: "an array",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def kind_of(value: object) -> str:
    """``an object``, ``a number``, ``null`` ... as JSON calls it, else the name of its type."""
    return _KINDS.get(type(value)) or f"a {type(value).__name__}"
