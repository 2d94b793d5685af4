from .checkpoint import read_state as read_state, step_of as step_of
from .edit import edit_run as edit_run
from .folder import RunFolder as RunFolder
from .log import RunLog as RunLog, read_log as read_log
from .loop import learn as learn, train as train
from .memory import memory_explained as memory_explained
from .mixture import mixture_begun_on as mixture_begun_on, mixture_lines as mixture_lines
from .model import GPT as GPT, block_mask as block_mask
from .ranks import choose_device as choose_device, joined_ranks as joined_ranks
from .requests import hand_over as hand_over
from .run import set_up as set_up
from .settings import (
    ModelSettings as ModelSettings,
    OptimSettings as OptimSettings,
    PretrainedSettings as PretrainedSettings,
    TrainSettings as TrainSettings,
    accumulation as accumulation,
    finetuning as finetuning,
    model_names as model_names,
    named_config as named_config,
    read_config as read_config,
    settings_from as settings_from,
)
from .start import DataRequest as DataRequest
from .start_checks import PATIENCE as PATIENCE, require_packages as require_packages
from .streaming import StreamOptions as StreamOptions, StreamRequest as StreamRequest
from .worker import run_worker as run_worker
from .worker_config import WorkerConfig as WorkerConfig
