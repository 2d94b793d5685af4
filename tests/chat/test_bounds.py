"""A template ends in text or in a named error, whatever it does."""

import datetime as dt

import pytest

from batchloom import InputError
from batchloom.chat import ChatTemplate, RenderError
from batchloom.core.errors import TemplateError

MESSAGES = [{"role": "user", "content": "hi"}]
DOUBLE = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = EXPR %}{% endfor %}"

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
    "doubling lists": DOUBLE.replace("EXPR", "[ns.x, ns.x]"),
    "doubling dicts": DOUBLE.replace("EXPR", "dict(a=ns.x, b=ns.x)"),
    "doubling by macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "m(" * 60 + "'a'" + ")" * 60 + " }}",
    "doubling by argument": "{% macro m(n, x) %}{% if n %}{{ m(n - 1, x + x) }}{% endif %}{% endmacro %}"
    "{{ m(60, 'aa') }}",
    "unrolled": "{% set x = 'aa' %}" + "{% set x = x + x %}" * 60,
    "times": "{{ 'a' * 10 ** 10 }}",
    "times a list": "{{ [['a' * 1000] * 1000] * 1000 * 1000 }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "ljust by item": "{{ 'a'['ljust'](10 ** 10) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 10) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format in format": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "buffered output": "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    "filtered output": "{% filter upper %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endfilter %}",
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "changing messages": "{{ messages.append(1) }}",
    "chance": "{{ [1, 2] | random }}",
    "lipsum": "{{ lipsum() }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name):
    with pytest.raises(TemplateError, match="template bad is stopped|template bad cannot be compiled"):
        ChatTemplate("bad", HOSTILE[name], {}).render(MESSAGES)


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
def test_what_a_template_does_not_take_is_told_of_the_conversation(text):
    with pytest.raises(RenderError, match="template bad does not take it"):
        ChatTemplate("bad", text, {}).render(MESSAGES)


@pytest.mark.parametrize("text", ["{% while %}", "{{ x", "{{ x | nosuchfilter }}"])
def test_what_is_no_template_is_told_with_its_line(text):
    with pytest.raises(InputError, match="template bad, line 2"):
        ChatTemplate("bad", f"\n{text}", {})


def test_large_conversations_may_take_more():
    """The same template over 3 million characters: what is allowed grows with what is given."""
    text = "{% set x = messages[0].content %}{% for c in x %}{% endfor %}{{ x + x }}"
    content = "a" * 3_000_000
    made = ChatTemplate("big", text, {}).render([{"role": "user", "content": content}]).text
    assert made == content * 2


def test_the_date_is_always_the_same():
    template = ChatTemplate("dated", "{{ strftime_now('%d %b %Y') }}", {})
    assert not template.asked_for_date
    assert template.render(MESSAGES).text == "26 Jul 2024"
    assert template.asked_for_date
    other = ChatTemplate("dated", "{{ strftime_now('%Y') }}", {}, dt.date(2031, 5, 6))
    assert other.render(MESSAGES).text == "2031"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages | tojson }}|{{ {'é': 1} | tojson(indent=2) }}|{{ '<' | tojson }}",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{% break %}{% endfor %}",
        "{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}",
        "{{ dict(a=1).a }}{{ dict.fromkeys('ab') }}{{ 'a-b'.split('-') | join('+') }}",
        "{{ 'x' | center(5) }}|{{ 'ab'.replace('a', 'c', 1) }}|{{ 'a,b' | replace(',', ';') }}",
        "{% macro m(x) %}[{{ caller(x) }}]{% endmacro %}{% call(y) m('ab') %}{{ y }}{% endcall %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ messages | map(attribute='content') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "  {% if true %}\n  a\n  {% endif %}\nb {{- 'c' -}} d\n",
        "{{ 'abc'.startswith('a') }}{{ ' x '.strip() }}{{ '%s-%05d' % ('a', 3) }}{{ '{:>4}'.format('x') }}",
        "{{ messages[0].items() | list }}{{ messages[0].get('role') }}{{ 'n'.join(['a', 'b']) }}",
        "{{ undefined_name }}{{ messages[0].nothing }}{{ 2 ** 8 }}{{ 'ab' * 3 }}{{ [1] * 2 }}",
        "{{ [3, 1] | sort }}{{ 'a b' | title }}{{ [[1, 2], [3]] | sum(start=[]) }}",
        "{% filter upper %}a{% endfilter %}{% set x %}b{{ 1 }}{% endset %}{{ x }}",
    ],
)
def test_tame_templates_give_what_transformers_gives(text):
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([MESSAGES], chat_template=text)
    assert ChatTemplate("tame", text, {}).render(MESSAGES).text == theirs[0]
