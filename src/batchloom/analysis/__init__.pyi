from .explanation import (
    DocumentQuery as DocumentQuery,
    ExplainedSequence as ExplainedSequence,
    ExplainedSpan as ExplainedSpan,
    ServedSequence as ServedSequence,
    explain as explain,
    explain_unserved as explain_unserved,
    find_serving_steps as find_serving_steps,
    iter_quarantine as iter_quarantine,
    when as when,
)
from .inspection import (
    Inspection as Inspection,
    inspect as inspect,
    list_packings as list_packings,
    measure_packing as measure_packing,
)
from .plan_forecast import (
    MixingMeasure as MixingMeasure,
    PlanForecast as PlanForecast,
    ShareWindow as ShareWindow,
    SourceForecast as SourceForecast,
    forecast_plan as forecast_plan,
    forecast_shares as forecast_shares,
)
from .plan_questions import (
    JournalEntry as JournalEntry,
    PlanRequest as PlanRequest,
    adopt_tables as adopt_tables,
    apply_logged_edits as apply_logged_edits,
    assign_step_ranks as assign_step_ranks,
    choose_last_step as choose_last_step,
    find_state_file as find_state_file,
    is_endless as is_endless,
    make_data_label as make_data_label,
    make_journal_entry as make_journal_entry,
    parse_weights as parse_weights,
    read_checkpoint as read_checkpoint,
    read_journal as read_journal,
    resolve_first_plan as resolve_first_plan,
    resolve_plan as resolve_plan,
    sort_by_rank as sort_by_rank,
    write_tables as write_tables,
)
