from .html_report import write_report_page as write_report_page
from .prepare_result import PrepareResult as PrepareResult, beyond as beyond, result_of as result_of
from .progress import (
    Listener as Listener,
    Note as Note,
    Phase as Phase,
    Progress as Progress,
    Tally as Tally,
    log_notes as log_notes,
)
from .report import (
    Content as Content,
    ReportedSource as ReportedSource,
    ReportFacts as ReportFacts,
    content_of as content_of,
    facts_of as facts_of,
    last_facts as last_facts,
    read_facts as read_facts,
    report_bytes as report_bytes,
)
from .report_pairs import (
    DuplicateExample as DuplicateExample,
    DuplicatePair as DuplicatePair,
    PairTally as PairTally,
    Rest as Rest,
    source_groups as source_groups,
)
