from .unit_names import collect_unit_settings as collect_unit_settings
from .worker_setup import WorkerSetup as WorkerSetup
