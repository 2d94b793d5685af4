from .append import base_of as base_of, kept_tokenizer as kept_tokenizer, new_inputs as new_inputs
from .finish import (
    Finished as Finished,
    finish_store as finish_store,
    make_manifest as make_manifest,
    move_store as move_store,
    subset_entry as subset_entry,
)
from .phase_runner import (
    Made as Made,
    Making as Making,
    Run as Run,
    unit_decided_by as unit_decided_by,
)
from .tokenize_unit import UnitRun as UnitRun
from .unit_shards import ShardTask as ShardTask, SubsetWriter as SubsetWriter
from .worker_setup import Hand as Hand
