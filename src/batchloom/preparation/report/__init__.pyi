from .html_report import write_report_page as write_report_page
from .prepare_result import (
    PrepareResult as PrepareResult,
    make_result as make_result,
    subtract_base as subtract_base,
)
from .progress import (
    JobCounters as JobCounters,
    Listener as Listener,
    Note as Note,
    Phase as Phase,
    Progress as Progress,
    log_note as log_note,
)
from .report import (
    PrepareReport as PrepareReport,
    ReportContent as ReportContent,
    ReportedSource as ReportedSource,
    build_content as build_content,
    encode_report as encode_report,
    parse_report as parse_report,
    read_last_report as read_last_report,
    read_report as read_report,
)
from .report_pairs import (
    DuplicateExample as DuplicateExample,
    DuplicatePair as DuplicatePair,
    DuplicatePairCounter as DuplicatePairCounter,
    OmittedRows as OmittedRows,
    group_sources as group_sources,
)
