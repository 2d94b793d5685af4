from .progress import (
    JobCounters as JobCounters,
    Listener as Listener,
    PrepareResult as PrepareResult,
    log_note as log_note,
)
from .report import (
    DuplicateExample as DuplicateExample,
    DuplicatePair as DuplicatePair,
    OmittedRows as OmittedRows,
    ReportedSource as ReportedSource,
    build_content as build_content,
    encode_report as encode_report,
    read_last_report as read_last_report,
    write_report_page as write_report_page,
)
