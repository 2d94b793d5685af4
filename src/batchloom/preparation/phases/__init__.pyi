from .append import (
    read_base_manifest as read_base_manifest,
    read_tokenizer_state as read_tokenizer_state,
    select_new_inputs as select_new_inputs,
)
from .finish import (
    CompletedJob as CompletedJob,
    finish_store as finish_store,
    make_manifest as make_manifest,
    make_subset_entry as make_subset_entry,
    move_store as move_store,
)
from .phase_runner import (
    PhaseResults as PhaseResults,
    PhaseRunner as PhaseRunner,
    RunContext as RunContext,
    collect_unit_settings as collect_unit_settings,
)
from .tokenize_unit import UnitTokenizer as UnitTokenizer
from .unit_shards import ShardSettings as ShardSettings, SubsetWriter as SubsetWriter
from .worker_setup import WorkerSetup as WorkerSetup
