from .finish import make_subset_entry as make_subset_entry
from .phase_runner import collect_unit_settings as collect_unit_settings
from .tokenize_unit import UnitTokenizer as UnitTokenizer
from .worker_setup import WorkerSetup as WorkerSetup
