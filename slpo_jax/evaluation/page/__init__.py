"""`report.html`: one page that needs no network, of a report and of the records it was made of."""
