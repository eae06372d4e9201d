"""Side-by-side benchmarks of scoring: correctness against float64 first, then seconds, memory and roofline.

``compare`` measures one rollout with every method, ``Row`` is what is written about each, ``peers`` holds the ways
people score today. The command is ``trace-fast bench``; ``benchmarks/`` adds suites of single ops on these helpers.
"""
