from .checkpoint import read_state as read_state, step_of as step_of
from .data.mixture_report import (
    mixture_begun_on as mixture_begun_on,
    mixture_lines as mixture_lines,
)
from .data.stream_run import StreamOptions as StreamOptions, StreamRequest as StreamRequest
from .demo_run import run_demo as run_demo
from .distributed import choose_device as choose_device, joined_ranks as joined_ranks
from .edit_requests import hand_over as hand_over
from .elastic_worker import WorkerReport as WorkerReport, run_worker as run_worker
from .loop import learn as learn, train as train
from .model.gpt_model import GPT as GPT, block_mask as block_mask
from .model.memory_estimate import memory_explained as memory_explained
from .run import set_up as set_up
from .run_edits import edit_run as edit_run
from .run_folder import RunFolder as RunFolder
from .start import DataRequest as DataRequest
from .start_checks import PATIENCE as PATIENCE, require_packages as require_packages
from .train_log import RunLog as RunLog, read_log as read_log
from .train_settings import (
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
from .worker_config import (
    DATASET_TYPES as DATASET_TYPES,
    MODEL_SIZES as MODEL_SIZES,
    Leave as Leave,
    WorkerConfig as WorkerConfig,
)
