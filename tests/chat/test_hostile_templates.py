"""Templates that ask for much with native code: each is stopped within two seconds, and within bounded memory."""

import contextlib
import datetime as dt
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchloom.chat import ChatTemplate, RenderError
from batchloom.core.errors import TemplateError

MESSAGES = [{"role": "user", "content": "hi"}]
# Names of values that many of them work on.
NUMBERS = "{% set a = range(99999) | list %}{% set b = range(99999) | list %}"
TEXTS = "{% set a = 'ab' * 499999 %}{% set b = 'ab' * 499998 ~ 'ab' %}"


def often(expression, given=""):
    return given + "{% for i in range(99999) %}{% if " + expression + " %}{% endif %}{% endfor %}"


HOSTILE = {
    "sum": often("range(99999) | sum"),
    "sum in a macro": "{% macro m() %}{{ range(99999) | sum }}{% endmacro %}{% for i in range(999) %}{{ m() }}{% endfor %}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) | length }}",
    "translate of markup": "{{ (('<' * 99) | e).translate({38: 'b' * 99999}) }}",
    "translate by a filter": "{{ ('a' | attr('translate'))({97: 'b' * 99999}) }}",
    "translate by map": "{{ (messages | map(attribute='content') | map(attribute='translate') | first)({104: 'b' * 99999}) }}",
    "encode": "{{ ('a' * 99999).encode('utf-32') }}",
    "to_bytes": "{{ (1).to_bytes(1000000000) }}",
    "sort": often("range(99999) | sort"),
    "sort in a namespace": "{% set ns = namespace(a=range(99999) | list) %}"
    "{% for i in range(99) %}{% set ns.b = ns.a | sort(reverse=true) %}{% endfor %}",
    "join": often("range(99999) | join"),
    "max": often("range(99999) | max"),
    "unique": often("range(99999) | map('string') | unique | list"),
    "groupby": often(
        "messages | map('string') | map('list') | first | groupby(0) | list | length + (range(99999) | sum)"
    ),
    "dictsort": often("d | dictsort", "{% set d = dict.fromkeys(range(9999) | map('string')) %}"),
    "batch": often("[1] | batch(9999, 'x') | list"),
    "slice": often("[1] | slice(9999, 'x') | list"),
    "reverse": often("(range(99999) | reverse | first) is none"),
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
    "tojson": often("a | tojson", NUMBERS),
    "tojson with an indent": "{% set ns = namespace(x=[]) %}{% for i in range(400) %}{% set ns.x = [ns.x, 1, 1, 1, 1] %}{% endfor %}"
    "{{ ns.x | tojson(indent=9999) | length }}",
    "tojson with separators": "{{ (range(99999) | list) | tojson(separators=('x' * 99999, 'y')) | length }}",
    "map of map": often("range(99999) | map('string') | map('length') | sum"),
    "map of center": "{{ range(99999) | map('center', 9999) | list | length }}",
    "map of a long attribute": "{{ range(99999) | map(attribute='" + "a." * 20000 + "a') | list | length }}",
    "select of nothing": often("range(99999) | select('gt', 1000000) | list"),
    "selectattr": often("range(99999) | selectattr('x') | list"),
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) if j is odd and j > 100000 %}{% endfor %}{% endfor %}",
    "in a range": often("'a' in range(99999)"),
    "in, as a test": often("'a' is in range(99999)"),
    "in a text": often("'y' in a", TEXTS),
    "equal lists": often("a == b", NUMBERS),
    "equal lists, as a test": often("a is eq b", NUMBERS),
    "equal lists in a chain": often("a == b == a", NUMBERS),
    "equal texts": often("a == b", TEXTS),
    "loop.changed": often("loop.changed(a if i is odd else b)", NUMBERS),
    "list.count": often("a.count('x')", NUMBERS),
    "str.count": often("a.count('aa')", TEXTS),
    "str.upper": often("a.upper()", TEXTS),
    "str.split": often("a.split('b')", TEXTS),
    "str.rfind": "{% set a = 'a' * 999999 %}{{ a.rfind('b' + 'a' * 499999) }}",
    "str.rsplit": "{% set a = 'a' * 999999 %}{{ a.rsplit('b' + 'a' * 499999) | length }}",
    "str.strip": "{% set a = 'a' * 999999 %}{{ a.strip('b' * 999998 + 'a') | length }}",
    "str.expandtabs": "{{ ('\\t' * 99999).expandtabs(9999) | length }}",
    "str.zfill": often("'1'.zfill(9999)"),
    "indent": "{{ ('\\n' * 99999) | indent(9999, true, true) | length }}",
    "title": often("a | title", TEXTS),
    "wordcount": often("a | wordcount", TEXTS),
    "urlencode": often("a | urlencode", TEXTS),
    "string of a list": often("a | string", NUMBERS),
    "slices of texts": often("a[1:]", TEXTS),
    "slices of lists": often("a[1:]", NUMBERS),
    "+": often("a[:499999] + a[:499999]", TEXTS),
    "+ again and again": TEXTS + "{{ (" + " + ".join(["a"] * 3000) + ") | length }}",
    "+ of lists": NUMBERS + "{{ (" + " + ".join(["a"] * 3000) + ") | length }}",
    "~ again and again": TEXTS + "{{ (" + " ~ ".join(["a"] * 3000) + ") | length }}",
    "~ of lists": often("a ~ ''", NUMBERS),
    "+ of numbers": "{% set ns = namespace(x=2) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "- of keys": often("d.keys() - d.keys()", "{% set d = dict.fromkeys(range(9999) | map('string')) %}"),
    "round": "{{ 2.5 | round(999999999, 'ceil') }}",
    "% with a name": "{{ '%(aaa)99999999s' % {'aaa': 1} }}",
    "% of one value": "{% set a = 'x' * 99999 %}{{ ('%(a)s' * 99999) % {'a': a} }}",
    "% without an end": "{{ ('%(' * 499999) % 1 }}",
    "% in a test": "{{ '%999999999d' is odd }}",
    "format of one value": "{% set a = 'x' * 99999 %}{{ ('{0}' * 99999).format(a) | length }}",
    "format filter of one value": "{% set a = 'x' * 99999 %}{{ ('%(a)s' * 99999) | format(a=a) | length }}",
    "filter block": "{% filter replace('a', 'b' * 99999) %}{% for i in range(9999) %}aaaaaaaaaa{% endfor %}{% endfilter %}",
    "dict.fromkeys": often("dict.fromkeys(range(99999))"),
    "keys of one hash": "{% set ns = namespace(k=[]) %}{% for i in range(9000) %}{% set ns.k = ns.k + [i * (2 ** 61 - 1)] %}"
    "{% endfor %}{{ dict.fromkeys(ns.k) | length }}",
    "keys of one hash in a literal": "{% set d = {" + ", ".join(f"{n * (2**61 - 1)}: 1" for n in range(2000)) + "} %}",
    "keys of one hash in a namespace": "{% set ns = namespace(k=[]) %}{% for i in range(9000) %}"
    "{% set ns.k = ns.k + [(i * (2 ** 61 - 1), 1)] %}{% endfor %}{% if namespace(ns.k) %}{% endif %}",
    "str.startswith": often("'a'.startswith(t)", "{% set t = ('b',) * 99999 %}"),
    "str.strip of markup": "{% set a = ('a' * 999999) | e %}{{ a.strip('b' * 999998 + 'a') | length }}",
    "in a short text": often("b in a", "{% set a = 'a' * 4096 %}{% set b = 'a' * 98 ~ 'b' %}"),
    "tuples as keys": often("d[t]", "{% set t = (1,) * 99999 %}{% set d = {} %}"),
    "tuples for get": often("d.get(t)", "{% set t = (1,) * 99999 %}{% set d = {} %}"),
    "a wide body": "{% for i in range(99999) %}" + "{% if i %}{% endif %}" * 3000 + "{% endfor %}",
    "a wide macro": "{% macro m() %}"
    + "{% if x %}{% endif %}" * 3000
    + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "a block": "{% block a %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endblock %}",
    "doubling by blocks": "{% block b0 %}xxxxxxxxxxxxxxxx{% endblock %}"
    + "".join(
        f"{{% block b{n} %}}{{{{ self.b{n - 1}() }}}}{{{{ self.b{n - 1}() }}}}{{% endblock %}}" for n in range(1, 40)
    ),
    "doubling by with": "{% set x = 'aa' %}" + "{% with x = x + x %}" * 60 + "{{ x }}" + "{% endwith %}" * 60,
    "doubling lists by with": "{% set x = ['aa'] %}" + "{% with x = [x, x] %}" * 60 + "{{ x }}" + "{% endwith %}" * 60,
    "doubling by namespaces": "{% set n0 = namespace(a=1) %}"
    + "".join(f"{{% set n{n} = namespace(a=[n{n - 1}, n{n - 1}]) %}}" for n in range(1, 60))
    + "{{ n59 }}",
    "doubling by views": "{% set v0 = 'a' %}"
    + "".join(f"{{% set v{n} = {{'a': v{n - 1}, 'b': v{n - 1}}}.values() %}}" for n in range(1, 60))
    + "{{ v59 }}",
    "brackets": "{{ " + "[" * 20000 + "1" + "]" * 20000 + " }}",
    "autoescape": "{% autoescape true %}{% set a = '<' * 199999 %}" + often("a ~ a") + "{% endautoescape %}",
    "markup": often("a + '<' * 99999", "{% set a = ('<' * 99999) | e %}"),
    "striptags": "{{ ('<!--' * 99999) | striptags }}",
    "urlize": "{{ ('http://a.b ' * 9999) | urlize }}",
    "wordwrap": "{{ ('a ' * 99999) | wordwrap(1, wrapstring='b' * 9999) }}",
    "pprint": "{{ range(99999) | list | pprint }}",
    "a long template": "{{ x }}" * 20_000,
}
# They end in a text or in a fault of the conversation, soon.
BOUNDED = {
    "many outputs": "{{x}}" * 13_000,
    "many branches": "{%if x%}{%endif%}" * 3800,
    "a long chain": "{{ " + "+".join(["x"] * 16_000) + " }}",
    "a number of many digits": "{{ ('9' * 999999) | int }}",
    "a format without an end": "{{ ('{' ~ ':' * 999999).format(1) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_native_work_is_stopped_within_two_seconds(name):
    begin = time.process_time()
    with pytest.raises(TemplateError, match="template bad is stopped|template bad cannot be compiled"):
        ChatTemplate("bad", HOSTILE[name], {}).render(MESSAGES)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("name", BOUNDED)
def test_large_templates_end_within_two_seconds(name):
    begin = time.process_time()
    with contextlib.suppress(RenderError):
        ChatTemplate("bad", BOUNDED[name], {}).render(MESSAGES)
    assert time.process_time() - begin < 2


MEMORY = """
import json, resource, sys
from batchloom.chat import RenderError, ChatTemplate
from batchloom.core import TemplateError
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for text in json.load(sys.stdin):
    try:
        ChatTemplate("bad", text, {}).render([{"role": "user", "content": "hi"}])
    except (TemplateError, RenderError) as error:
        assert not isinstance(error.__cause__, MemoryError), text[:200]
if sys.platform == "linux":
    # Not ru_maxrss, which a process has from the one that it was forked from.
    (peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    assert int(peak.split()[1]) < 700 << 10, peak
"""


@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_native_work_takes_bounded_memory(share):
    """In a process that has 2 GiB of address space."""
    texts = [*HOSTILE.values(), *BOUNDED.values()][::share]
    subprocess.run([sys.executable, "-c", MEMORY], input=json.dumps(texts), text=True, check=True)


@pytest.mark.parametrize("size", [100, 800, pytest.param(2000, marks=pytest.mark.slow)])
def test_templates_may_look_at_all_messages_from_each(size):
    """As Gemma 4's does."""
    text = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for other in messages[:loop.index0] %}"
        "{% if other.role == m.role %}{% set ns.n = loop.index %}{% endif %}{% endfor %}{{ m.content }}{{ ns.n }},{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[n % 2], "content": "hi"} for n in range(size)]
    made = ChatTemplate("pairs", text, {}).render(messages).text
    assert made == "".join(f"hi{max(0, n - 1)}," for n in range(size))


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a-b' | attr('upper') is defined }}{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}{{ 'a' + 'b' + messages[0].role + 'c' }}",
        "{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ 'role' in messages[0] }}{{ 1 not in [1] }}{{ messages == messages }}{{ 1 == 1.0 }}",
        "{{ messages[0].role[1:] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[-1] }}{{ messages[0]['ro' ~ 'le'] }}{{ 7 - 2 - 1 }}",
        "{{ [1, 2, 3] | sum }}{{ messages | sum(attribute='x', start=0) if false }}{{ [3, 1] | max }}{{ 'aab' | unique | list }}",
        "{% with a = 1, b = 'x' %}{{ a }}{{ b }}{% endwith %}{% block x %}b{{ 1 }}{% endblock %}{{ self.x() }}",
        "{{ dict([('a', 1)], b=2) }}{{ dict.fromkeys([1, 2]) }}{{ {'a': 1}.get('b', 3) }}{{ {'a': 1}.keys() | list }}",
        "{{ '%s-%s' | format('a', 'b') }}{{ '%(x)s' | format(x=1) }}{{ 'a\\tb'.expandtabs(4) }}{{ 'ab'.ljust(4, '.') }}|",
        "{% set ns = namespace() %}{{ ns.x is defined }}{% set ns.x = 0 %}{{ ns.x }}{{ ns.y is defined }}{{ ns['x'] is defined }}",
        "{{ [['a', 1], ['b', 2]] | map('first') | join }}{{ messages | selectattr('role', 'eq', 'user') | list | length }}",
        "{{ messages | tojson(indent=2) }}{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}{{ '<' | e ~ '<' }}{{ 2.345 | round(1) }}",
        "{{ 5 is odd }}{{ 6 is divisibleby 3 }}{{ 'a' is in 'abc' }}{{ 'A' is upper }}{{ 3 is gt 2 }}{{ loop is defined }}",
        "{% for m in messages recursive %}{{ loop.index }}{{ loop.changed(1) }}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner('|') %}{{ j() }}x{{ j() }}",
    ],
)
def test_operations_give_what_transformers_gives(text):
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([MESSAGES], chat_template=text)
    assert ChatTemplate("tame", text, {}).render(MESSAGES).text == theirs[0]


TRL = importlib.util.find_spec("trl")
PUBLISHED = ["llama3_2", "qwen3", "gemma3", "deepseekv3", "gptoss", "glm4moe", "cohere"]


@pytest.mark.skipif(TRL is None, reason="TRL, which comes with published templates, is not here")
@pytest.mark.parametrize("name", PUBLISHED)
def test_long_conversations_are_those_of_transformers_with_published_templates(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    path = Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"this TRL has no {path.name}")
    roles = ("user", "assistant")
    many = [{"role": roles[n % 2], "content": f"turn {n}"} for n in range(2000)]
    large = [{"role": role, "content": "Some words. </think>\n" * 50_000} for role in roles]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(name, path.read_text(), tokens, dt.datetime.now(tz=dt.UTC).date())
    for messages in (many, large):
        theirs, _ = render_jinja_template([messages], chat_template=path.read_text(), **tokens)
        assert template.render(messages).text == theirs[0]
