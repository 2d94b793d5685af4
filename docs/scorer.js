// Order of the results of a search: what to do comes first, and why it was decided so comes last.
var Scorer = {
  score: ([page, _title, _anchor, _description, score]) => {
    if (page.startsWith("explanation/decisions/") || page.startsWith("project/changelog")) return score - 100;
    return page.startsWith("how-to/") || page.startsWith("tutorials/") ? score + 20 : score;
  },
  // The rest is Sphinx's own.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
