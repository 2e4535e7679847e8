"""What bench/bench.py is made of: shapes, candidates, timing, errors, records, pages and plots."""
