from .find_duplicates import DuplicatePairCounter as DuplicatePairCounter, group_sources as group_sources
from .finish import make_subset_entry as make_subset_entry
from .tokenize_unit import SeenTexts as SeenTexts, UnitTokenizer as UnitTokenizer
from .worker_setup import (
    WorkerSetup as WorkerSetup,
    check_versions as check_versions,
    collect_unit_settings as collect_unit_settings,
    collect_versions as collect_versions,
)
