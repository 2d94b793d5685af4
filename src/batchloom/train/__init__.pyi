from .demo_run import run_demo as run_demo
from .elastic_worker import WorkerReport as WorkerReport, run_worker as run_worker
from .loop import run_optimizer_step as run_optimizer_step, start_training as start_training, train as train
from .model.gpt_model import GPT as GPT, make_attention_mask as make_attention_mask
from .model.model_build import explain_memory_errors as explain_memory_errors
from .request import (
    EDIT_TIMEOUT_S as EDIT_TIMEOUT_S,
    DataRequest as DataRequest,
    LeaveEvent as LeaveEvent,
    MediaPaths as MediaPaths,
    StoreOptions as StoreOptions,
    StreamOptions as StreamOptions,
    TrainRequest as TrainRequest,
    WorkerConfig as WorkerConfig,
    require_train_packages as require_train_packages,
)
from .run import describe_mixture as describe_mixture, set_up_run as set_up_run
from .run_data import find_recorded_data as find_recorded_data
from .run_edits import (
    EditResult as EditResult,
    edit_run as edit_run,
    find_banned_documents as find_banned_documents,
    find_run as find_run,
    submit_edit as submit_edit,
)
from .run_folder import (
    RunFolder as RunFolder,
    RunLog as RunLog,
    read_checkpoint_state as read_checkpoint_state,
)
from .train_settings import (
    ModelSettings as ModelSettings,
    OptimSettings as OptimSettings,
    PretrainedSettings as PretrainedSettings,
    TrainSettings as TrainSettings,
    apply_finetuning_defaults as apply_finetuning_defaults,
    list_model_names as list_model_names,
    load_named_config as load_named_config,
    make_settings as make_settings,
    read_config as read_config,
)
