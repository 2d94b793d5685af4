from .dataset_run import (
    dataset_store as dataset_store,
    order_line as order_line,
    tokenizer_for as tokenizer_for,
)
from .memory_store import temporary_store as temporary_store
from .missing_data import stand_in as stand_in
from .mixture_report import mixture_begun_on as mixture_begun_on, mixture_lines as mixture_lines
from .stream_run import (
    StreamData as StreamData,
    StreamOptions as StreamOptions,
    StreamRequest as StreamRequest,
    as_store as as_store,
    end_keeping as end_keeping,
    refuse_other_stream as refuse_other_stream,
    streamed as streamed,
    tell_stream as tell_stream,
    whole_state as whole_state,
)
from .train_media import (
    check_media as check_media,
    given_of as given_of,
    holds_media as holds_media,
    try_media as try_media,
    write_processor as write_processor,
)
