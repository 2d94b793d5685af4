from .dataset_run import (
    choose_tokenizer as choose_tokenizer,
    describe_order as describe_order,
    prepare_dataset_store as prepare_dataset_store,
)
from .memory_store import prepare_temporary_store as prepare_temporary_store
from .missing_data import choose_synthetic_data as choose_synthetic_data
from .mixture_report import (
    describe_mixture as describe_mixture,
    open_mixture_generations as open_mixture_generations,
)
from .stream_run import (
    StreamData as StreamData,
    StreamRequest as StreamRequest,
    announce_stream as announce_stream,
    as_store as as_store,
    as_stream as as_stream,
    check_run_stream as check_run_stream,
    finish_stream_store as finish_stream_store,
    merge_loader_state as merge_loader_state,
)
from .train_media import (
    check_media_isolation as check_media_isolation,
    check_media_model as check_media_model,
    holds_media as holds_media,
    make_model_inputs as make_model_inputs,
    write_processor_files as write_processor_files,
)
