"""Sandbox of chat templates: limits, and agreement with transformers."""

import datetime as dt
import importlib.util
import itertools
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from batchloom import InputError
from batchloom.chat import ChatTemplate, RenderError
from batchloom.core.errors import TemplateError

MESSAGES = [{"role": "user", "content": "hi"}]
NUMBERS = "{% set a = range(9999) | list %}{% set b = range(9999) | list %}"
TEXTS = "{% set a = 'ab' * 49999 %}"


def repeat_expression(expression, setup=""):
    return setup + "{% for i in range(99999) %}{% if " + expression + " %}{% endif %}{% endfor %}"


DOUBLE = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = EXPR %}{% endfor %}"

SHARED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
DEEP_TUPLE = (
    "{% set ns = namespace(a=1) %}{% for i in range(9999) %}"
    + "".join(f"{{% for t{n} in {{'k': {f't{n - 1}' if n else 'ns.a'}}}.items() %}}" for n in range(8))
    + "{% set ns.a = t7 %}"
    + "{% endfor %}" * 9
)
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over constants": "{% for i in range(99999) %}" + "{% for j in [1,2,3,4,5,6,7,8] %}" * 5 + "{% endfor %}" * 6,
    "recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "recursive loop by another name": "{% for i in range(9) recursive %}{% set f = loop %}"
    "{{ f(range(9)) if loop.depth < 20 }}{% endfor %}",
    "recursive macro": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}"
    "{% endif %}{% endmacro %}{{ m(60) }}",
    "doubling by +": DOUBLE.replace("EXPR", "ns.x + ns.x"),
    "doubling by ~": DOUBLE.replace("EXPR", "ns.x ~ ns.x"),
    "doubling lists": DOUBLE.replace("EXPR", "[ns.x, ns.x]") + "{{ ns.x }}",
    "doubling dicts": DOUBLE.replace("EXPR", "dict(a=ns.x, b=ns.x)"),
    "doubling by macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "m(" * 60 + "'a'" + ")" * 60 + " }}",
    "unrolled": "{% set x = 'aa' %}" + "{% set x = x + x %}" * 60,
    "times": "{{ 'a' * 10 ** 10 }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "buffered output": "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    "filtered output": "{% filter upper %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endfilter %}",
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "changing messages": "{{ messages.append(1) }}",
    "chance": "{{ [1, 2] | random }}",
    "lipsum": "{{ lipsum() }}",
    "sum": repeat_expression("range(9999) | sum"),
    "sort": repeat_expression("range(9999) | sort"),
    "unique": repeat_expression("range(9999) | map('string') | unique | list"),
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) if j is odd and j > 100000 %}{% endfor %}{% endfor %}",
    "equal lists": repeat_expression("a == b", NUMBERS),
    "list.count": repeat_expression("a.count('x')", NUMBERS),
    "str.split": repeat_expression("a.split('b')", TEXTS),
    "wordcount": repeat_expression("a | wordcount", TEXTS),
    "+ of lists": NUMBERS + "{{ (" + " + ".join(["a"] * 3000) + ") | length }}",
    "~ of lists": repeat_expression("a ~ ''", NUMBERS),
    "a wide macro": "{% macro m() %}"
    + "{% if x %}{% endif %}" * 1000
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
    "replacing nothing": "{{ 'A' | replace('', 'x' * 10 ** 5) | replace('', 'y' * 10 ** 5) }}",
    "replacing by a method": "{% set x = 'a' * 9999 %}{{ x.replace('a', x).replace('a', x) }}",
    "replacing in each": "{{ range(99999) | map('replace', '1', 'x' * 9999) | list | length }}",
    "joining": "{% set x = 'a' * 9999 %}{{ (range(9999) | join(x)) }}",
    "joining by a method": "{% set x = 'a' * 9999 %}{{ x.join(x) }}",
    "joining a list": "{% set x = 'a' * 9999 %}{{ x.join(range(9999) | map('string')) }}",
    "joining by safe text": "{% set x = ('a' * 9999) | safe %}{{ x.join(x) }}",
    "replacing in safe text": "{% set x = ('a' * 9999) | safe %}{{ x.replace('a', x) }}",
    "a wide format": "{{ '%1000000000d' | format(1) }}",
    "a wide % format": "{{ '%-1000000000s' % 'a' }}",
    "a wide format by a value": "{{ '%*d' | format(10 ** 9, 1) }}",
    "a wide format of a key": "{{ '%(x).1000000000f' | format(x=1) }}",
    "a format of many": "{% set x = 'a' * 9999 %}{{ ('%(x)s' * 9999) | format(x=x) }}",
    "a method for formats": "{{ '{:1000000000}'.format(1) }}",
    "a method for formats, as an item": "{{ '{:1000000000}'['format_map']({}) }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "batch": "{{ [1] | batch(10 ** 9, 1) | list }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "indent by a text": "{% set x = 'a' * 9999 %}{{ ('\n' * 9999) | indent(x, true, true) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "padding": "{{ 'a'.ljust(10 ** 9) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "zeros": "{{ '1'.zfill(10 ** 9) }}",
    "bytes of an integer": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "translation": "{{ 'aaa'.translate({97: 'a' * 10 ** 6}) }}",
    "repeated squaring": "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "squaring in one expression": "{{ ((((9 ** 4000) ** 4000) ** 4000) ** 4000) % 7 }}",
    "rounding": "{{ 1 | round(10 ** 8, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 30000) | sum(start=[]) | length }}",
    "many sums": "{% set x = 'a' * 9999 %}{{ (" + " + ".join(["x"] * 3000) + ") | length }}",
    "many concatenations": "{% set x = 'a' * 9999 %}{{ (" + " ~ ".join(["x"] * 3000) + ") | length }}",
    "a list of one text": "{% set x = 'a' * 9999 %}{{ ([x] * 9999) | string | length }}",
    "one text for each": "{% set x = 'a' * 9999 %}{{ range(9999) | map('lower') | map('replace', '1', x) | join | length }}",
    "a default for each": "{% set x = 'a' * 9999 %}{{ ([''] * 9999) | map('default', x, true) | list | string }}",
    "arguments of a macro": "{% set x = 'a' * 9999 %}{% macro m() %}{{ varargs | string | length }}{% endmacro %}"
    "{{ m(" + ", ".join(["x"] * 3000) + ") }}",
    "arguments of a cycler": "{% set x = 'a' * 9999 %}{{ cycler(" + ", ".join(["x"] * 3000) + ").items | string }}",
    "quoted quotes": "{{ '\"' " + "| tojson " * 40 + "}}",
    "escaped signs": "{{ ('&' * 999) " + "| e " * 4000 + "}}",
    "JSON with wide separators": "{{ range(9999) | list | tojson(separators=('x' * 9999, ':')) }}",
    "namespaces that hold each other": "".join(f"{{% set n{n} = namespace() %}}" for n in range(60))
    + "".join(f"{{% set n{n}.a = n{n - 1} %}}{{% set n{n}.b = n{n - 1} %}}" for n in range(59, 0, -1))
    + "{{ n59 }}",
    "counting back": "{% set _ = [0 - 10 ** 12] | map(' count') | list %}{{ ('x' * 500000000) | length }}",
    "searching a list": "{% set l = [1] * 8000 %}{{ range(99999) | select('in', l) | list | length }}",
    "searching in one expression": "{% set l = [1] * 8000 %}{{ " + " or ".join(["2 in l"] * 8000) + " }}",
    "equal lists of lists": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "sorted lists of lists": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ [ns.a, ns.b] | sort | length }}",
    "counted lists of lists": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ [ns.b].count(ns.a) }}",
    "keys of tuples": "{% set ns = namespace(a=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
    "{{ {}[ns.a] }}",
    "keys in one place": "{{ range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list | length }}",
    "keys in one place, made": "{% set ns = namespace(n=2 ** 59) %}{% for i in range(9) %}{% set ns.n = ns.n + ns.n %}{% endfor %}",
    "long integers": "{% set x = ('f' * 1000) | int(0, 16) %}{{ ([0 - x] * 99999) | map('abs') | list | length }}",
    "wide fields": "{% set s = '%(a)999s' * 1000 %}{{ (s % {'a': 1}) | length }}",
    "brackets": "{{ " + "[" * 20000 + "1" + "]" * 20000 + " }}",
    "a long template": "{{ x }}" * 20_000,
    "searching backwards": "{{ ('a' * 4000000).rfind('a' * 1000000 ~ 'b' ~ 'a' * 1000000) }}",
    "splitting backwards": "{{ ('a' * 4000000).rsplit('a' * 1000000 ~ 'b' ~ 'a' * 1000000) }}",
    "stripping": "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') | length }}",
    "trim": "{{ ('a' * 4000000) | trim('b' * 4000000 ~ 'a') | length }}",
    "attributes of letters": "{{ ('ab' * 2000000) | sort(attribute='x,' * 1000) | length }}",
    "a deep attribute": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ([ns] * 50) | map(attribute='x.' * 999999 ~ 'x') | list }}",
    "a generator of lists": SHARED + "{{ [ns.a, ns.b] | map('default') | max | length }}",
    "a reversed list": SHARED + "{{ [ns.a, ns.b] | reverse | max | length }}",
    "a loop as a list": SHARED + "{% for x in [1, ns.a, ns.b] %}{{ loop | max }}{% endfor %}",
    "a view of a list": SHARED + "{{ {'a': ns.a}.items() }}",
    "equal views": SHARED + "{{ {'a': ns.a}.items() == {'a': ns.b}.items() }}",
    "case of a list": SHARED + "{{ ns.a is lower }}",
    "tuples as keys": "{% set ns = namespace(a=1) %}{% for i in range(60) %}{% for t in {ns.a: ns.a}.items() %}"
    "{% set ns.a = t %}{% endfor %}{% endfor %}",
    "a deep key": DEEP_TUPLE + "{{ {}[ns.a] }}",
    "a deep key of dict": DEEP_TUPLE + "{{ dict([[ns.a, 1]]) }}",
    "a deep key of get": DEEP_TUPLE + "{{ {}.get(ns.a) }}",
    "a deep key that is sought": DEEP_TUPLE + "{{ ns.a in {} }}",
    "a deep key that is tested": DEEP_TUPLE + "{{ [ns.a] | select('in', {}) | list }}",
    "a deep attribute of a key": DEEP_TUPLE + "{{ [{}] | map(attribute=ns.a) | list }}",
    "ranges in filters": "{{ ([range(99999)] * 1000) | map('max', attribute='real.' * 200 ~ 'real') | list | length }}",
    "groups of letters": "{{ ('\U0001f600' * 4000000) | groupby('x', default='') | length }}",
    "sorted letters": "{{ ('\U0001f600' * 4000000) | sort | length }}",
    "titles": "{{ ('\u4e2d-' * 2000000) | title | length }}",
    "pieces": "{{ ('\U0001f600 ' * 2000000).split() | length }}",
    "floats in formats": "{{ ('%(a)f' * 500000) | format(a=1e308) | length }}",
    "an open format": "{{ ('%(' * 1000000 ~ 'x' * 1000000) % {} }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name, monkeypatch):
    monkeypatch.setattr("batchloom.chat.templates.rendering_meter._MAX_SECONDS", 0.03)
    monkeypatch.setattr("batchloom.chat.templates.rendering_meter._BASE_BUDGET", 1 << 16)
    with pytest.raises(TemplateError, match="template bad was stopped|template bad cannot be compiled"):
        ChatTemplate("bad", HOSTILE[name], {}).render(MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_takes_little_memory(name, monkeypatch):
    monkeypatch.setattr("batchloom.chat.templates.rendering_meter._MAX_SECONDS", 0.3)
    monkeypatch.setattr("batchloom.chat.templates.rendering_meter._BASE_BUDGET", 1 << 16)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            ChatTemplate("bad", HOSTILE[name], {}).render(MESSAGES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Compiling takes a part of it.
    assert peak < 96 << 20


def test_a_template_that_keeps_all_it_makes_is_stopped(monkeypatch):
    text = "{% set x = 'a' * 9999 %}" + "".join(f"{{% set x{n} = x[{n}:] %}}" for n in range(2000))
    monkeypatch.setattr("batchloom.chat.templates.rendering_meter._BASE_BUDGET", 1 << 16)
    ChatTemplate("few", text, {}).render(MESSAGES)
    memory = itertools.count(1 << 30, 1 << 26)
    monkeypatch.setattr("batchloom.chat.templates.rendering_meter.measure_memory", lambda: next(memory))
    with pytest.raises(TemplateError, match="more than 256 MiB of memory"):
        ChatTemplate("many", text, {}).render(MESSAGES)


@pytest.mark.parametrize("expression", ["'x'.center(5)", "'{}'.format(1)", "'x' | wordwrap(5)", "'x' | pprint"])
def test_what_no_published_template_uses_is_refused_by_name(expression):
    with pytest.raises(TemplateError, match=re.search(r"[.|] ?(\w+)", expression)[1]):
        ChatTemplate("bad", f"{{{{ {expression} }}}}", {}).render(MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{% include 'x' %}",
        "{{ range(10 ** 9) }}",
        "{{ nothing.there }}",
        "{{ raise_exception('no') }}",
        "{{ 1 + 'a' }}",
        "{{ messages[9].x.y }}",
        "{{ 1 / 0 }}",
    ],
)
def test_an_error_of_a_template_rejects_the_conversation(text):
    with pytest.raises(RenderError, match="template bad rejects it"):
        ChatTemplate("bad", text, {}).render(MESSAGES)


@pytest.mark.parametrize("text", ["{% while %}", "{{ x", "{{ x | nosuchfilter }}"])
def test_a_syntax_error_is_reported_with_its_line(text):
    with pytest.raises(InputError, match="template bad, line 2"):
        ChatTemplate("bad", f"\n{text}", {})


@pytest.mark.parametrize(
    "text",
    [
        "{% set ns = namespace(o='') %}{% for m in messages %}{% set ns.o = ns.o + m.content %}{% endfor %}{{ ns.o }}",
        "{% set ns = namespace(o=[]) %}{% for m in messages %}{% set ns.o = ns.o + [m.content] %}{% endfor %}{{ ns.o | join }}",
        "{% set ns = namespace(o='') %}{% for m in messages %}{% set ns.o = ns.o ~ m.content %}{% endfor %}{{ ns.o }}",
    ],
)
def test_a_long_conversation_may_be_collected(text):
    """Each round makes all of the text anew, but most of it is garbage."""
    messages = [{"role": "user", "content": f"{number} " * 100} for number in range(2000)]
    rendered = ChatTemplate("collects", text, {}).render(messages).text
    assert rendered == "".join(message["content"] for message in messages)


@pytest.mark.parametrize("text", ["{{ 1e999 }}", "{{ cycler() }}", "{{ ('nan' | float) | tojson }}"])
def test_odd_errors_reject_the_conversation(text):
    with pytest.raises(RenderError, match="template bad rejects it"):
        ChatTemplate("bad", text, {}).render(MESSAGES)


def test_a_continue_behind_an_inner_loop_belongs_to_the_outer_one():
    text = "{% for x in [1, 2] %}{% for a, b in [] %}{% else %}{% continue %}{% endfor %}y{% endfor %}"
    rendered = ChatTemplate("t", text, {}).render(MESSAGES, mark_round=lambda item: (f"<{item}", ">")).text
    assert rendered == "<1><2>"


def test_large_conversations_may_take_more():
    """Limits grow with the conversation: here with a million characters."""
    template = "{% set x = messages[0].content %}{% for c in x %}{% endfor %}{{ x + x }}"
    content = "a" * 1_000_000
    rendered = ChatTemplate("big", template, {}).render([{"role": "user", "content": content}]).text
    assert rendered == content * 2


def test_the_date_is_always_the_same():
    template = ChatTemplate("dated", "{{ strftime_now('%d %b %Y') }}", {})
    assert not template.asked_for_date
    assert template.render(MESSAGES).text == "26 Jul 2024"
    assert template.asked_for_date
    dated_template = ChatTemplate("dated", "{{ strftime_now('%Y') }}", {}, dt.date(2031, 5, 6))
    assert dated_template.render(MESSAGES).text == "2031"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages | tojson }}|{{ {'é': 1} | tojson(indent=2) }}|{{ '<' | tojson }}",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{% break %}{% endfor %}",
        "{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}",
        "{{ dict(a=1).a }}{{ 'a-b'.split('-') | join('+') }}",
        "{{ 'ab'.replace('a', 'c', 1) }}|{{ 'a,b' | replace(',', ';') }}",
        "{% macro m(x) %}[{{ caller(x) }}]{% endmacro %}{% call(y) m('ab') %}{{ y }}{% endcall %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ messages | map(attribute='content') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "  {% if true %}\n  a\n  {% endif %}\nb {{- 'c' -}} d\n",
        "{{ 'abc'.startswith('a') }}{{ ' x '.strip() }}{{ '%s-%05d' % ('a', 3) }}",
        "{{ messages[0].items() | list }}{{ messages[0].get('role') }}{{ 'n'.join(['a', 'b']) }}",
        "{{ undefined_name }}{{ messages[0].nothing }}{{ 2 ** 8 }}{{ 'ab' * 3 }}{{ [1] * 2 }}",
        "{{ [3, 1] | sort }}{{ 'a b' | title }}{{ [[1, 2], [3]] | map('sum') | sum(start=1) }}",
        "{% filter upper %}a{% endfilter %}{% set x %}b{{ 1 }}{% endset %}{{ x }}",
    ],
)
def test_tame_templates_give_what_transformers_gives(text):
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template([MESSAGES], chat_template=text)
    assert ChatTemplate("tame", text, {}).render(MESSAGES).text == expected[0]


@pytest.mark.parametrize(
    "text",
    [
        "{{ dict.update(messages[0], {'role': 'evil'}) }}",
        "{{ dict.pop(messages[0], 'content') }}",
        "{{ messages[0].clear() }}",
        "{{ messages.append(1) }}",
        "{% for m in messages %}{% set _ = m.update({'role': 'evil'}) %}{% endfor %}",
    ],
)
def test_a_template_changes_no_message(text):
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises((TemplateError, RenderError)):
        ChatTemplate("bad", text, {}).render(messages)
    assert messages == MESSAGES


@pytest.mark.parametrize("size", [100, 800, pytest.param(1500, marks=pytest.mark.slow)])
def test_templates_may_look_at_all_messages_from_each(size):
    """Gemma 4's template loops over all messages for each message."""
    template = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for other in messages[:loop.index0] %}"
        "{% if other.role == m.role %}{% set ns.n = loop.index %}{% endif %}{% endfor %}{{ m.content }}{{ ns.n }},{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[n % 2], "content": "hi"} for n in range(size)]
    rendered = ChatTemplate("pairs", template, {}).render(messages).text
    assert rendered == "".join(f"hi{max(0, n - 1)}," for n in range(size))


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a-b' | attr('upper') is defined }}{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}{{ 'a' + 'b' + messages[0].role + 'c' }}",
        "{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ 'role' in messages[0] }}{{ 1 not in [1] }}{{ messages == messages }}{{ 1 == 1.0 }}",
        "{{ messages[0].role[1:] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[-1] }}{{ messages[0]['ro' ~ 'le'] }}{{ 7 - 2 - 1 }}",
        "{{ [1, 2, 3] | sum }}{{ 'abcb'.rfind('b') }}{{ 'a b'.rsplit(' ', 1) }}{{ 'xxa'.lstrip('x') }}{{ [3, 1] | max }}{{ [{'n': 1}] | sum(attribute='n') }}{{ 2.55 | round(1, method='floor') }}{{ 10 ** 18 }}",
        "{% with a = 1, b = 'x' %}{{ a }}{{ b }}{% endwith %}{% block x %}b{{ 1 }}{% endblock %}{{ self.x() }}",
        "{{ dict([('a', 1)], b=2) }}{{ dict([[1, 2]]) }}{{ {'a': 1}.get('b', 3) }}{{ {'a': 1}.keys() | list }}",
        "{{ '%s-%s' | format('a', 'b') }}{{ '%(x)s' | format(x=1) }}|",
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

    expected, _ = render_jinja_template([MESSAGES], chat_template=text)
    assert ChatTemplate("tame", text, {}).render(MESSAGES).text == expected[0]


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
    many_turns = [{"role": roles[n % 2], "content": f"turn {n}"} for n in range(2000)]
    large_turns = [{"role": role, "content": "Some words. </think>\n" * 50_000} for role in roles]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(name, path.read_text(), tokens, dt.datetime.now(tz=dt.UTC).date())
    for messages in (many_turns, large_turns):
        expected, _ = render_jinja_template([messages], chat_template=path.read_text(), **tokens)
        assert template.render(messages).text == expected[0]


LIMITS_SCRIPT = """
import re, sys, time
from batchloom.chat import ChatTemplate
from batchloom.core.errors import TemplateError

text, size = sys.stdin.read(), int(sys.argv[1])
try:
    ChatTemplate("bad", text, {}).render([{"role": "user", "content": "h" * size}])
except TemplateError:
    print(time.thread_time(), re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""
COSTLY = [
    "nested loops",
    "equal lists of lists",
    "a wide macro",
    "one text for each",
    "a deep attribute",
    "sorted letters",
]
COSTLY += [
    "floats in formats",
    "searching backwards",
    "pieces",
    "a deep key",
    "many concatenations",
    "arguments of a macro",
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("size", [2, 1_000_000])
@pytest.mark.parametrize("name", COSTLY)
def test_the_limits_hold_as_they_are_shipped(name, size):
    command = [sys.executable, "-c", LIMITS_SCRIPT, str(size)]
    result = subprocess.run(command, input=HOSTILE[name], capture_output=True, text=True, check=True)
    seconds, peak = map(float, result.stdout.split())
    # Five seconds, and as long again for what runs between two looks at the clock, on a machine of half the speed.
    assert seconds < 20
    assert peak < 1 << 19, "KiB"
