from .stream_batches import StreamBatchWriter as StreamBatchWriter, read_stream_batches as read_stream_batches
from .unit_report import (
    ReasonCounts as ReasonCounts,
    count_reason as count_reason,
    describe_bad_records as describe_bad_records,
)
from .unit_rows import mark_first_of_records as mark_first_of_records
from .unit_tokenizer import UnitTokenizer as UnitTokenizer
from .units import (
    Unit as Unit,
    UnitProgress as UnitProgress,
    UnitTask as UnitTask,
    UnusableError as UnusableError,
    compute_unit_identity as compute_unit_identity,
    plan_units as plan_units,
)
from .work_folder import PartCounts as PartCounts, UnitFacts as UnitFacts
