"""Keyword arguments of prepare, stream and doctor against the recipe they fill."""

import subprocess
import sys

import pytest

import batchloom
from batchloom.core.settings import list_settings
from batchloom.preparation import ExecutionSettings, PrepareOptions, RunSettings, StreamedOptions
from batchloom.preparation.request import SETTINGS


def test_prepare_takes_every_setting_of_a_recipe_and_of_a_run():
    of_run = {field.name for cls in (RunSettings, ExecutionSettings) for field in list_settings(cls)}
    assert set(PrepareOptions.__annotations__) == {*SETTINGS, *of_run}


def test_unknown_keywords_name_the_nearest(tmp_path):
    with pytest.raises(TypeError, match=r"prepare\(\) has no argument 'tokeniser'; did you mean 'tokenizer'\?"):
        batchloom.prepare("x.txt", out=tmp_path, tokeniser="bytes")
    for name, meant in (("num_proc", "workers"), ("text_column", "text_field"), ("seq_len", "it to the Loader")):
        with pytest.raises(TypeError, match=rf"prepare\(\) has no argument '{name}'; give {meant}"):
            batchloom.prepare("x.txt", out=tmp_path, **{name: "x"})
    with pytest.raises(TypeError, match=r"stream\(\) has no argument 'dedup'"):
        batchloom.stream("x.txt", seq_len=8, global_batch_size=2, steps=1, dedup="exact")
    with pytest.raises(TypeError, match=r"doctor\(\) has no argument 'cleen'"):
        batchloom.doctor("x.txt", cleen=[])
    assert "dedup" not in StreamedOptions.__annotations__


# Mypy needs half a second for the modules that declare the keywords, and twenty seconds for all that they import.
DECLARING_MODULES = """
[mypy]
follow_imports = skip
[mypy-batchloom,batchloom.preparation,batchloom.preparation.prepare_job,batchloom.preparation.keywords]
follow_imports = silent
"""
ALL_MODULES = "[mypy]\nfollow_imports = silent\n"


@pytest.mark.slow
@pytest.mark.parametrize("configuration", [DECLARING_MODULES, ALL_MODULES], ids=["few", "all"])
def test_type_checkers_see_the_keywords(tmp_path, configuration):
    (tmp_path / "mypy.ini").write_text(configuration)
    script = tmp_path / "script.py"
    script.write_text('import batchloom\nbatchloom.prepare("x", out="s", val_fraction="much", tokeniser="bytes")\n')
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--config-file=mypy.ini", str(script)]
    output = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path).stdout
    assert 'Argument "val_fraction" to "prepare" has incompatible type "str"' in output
    assert 'Unexpected keyword argument "tokeniser" for "prepare"' in output
