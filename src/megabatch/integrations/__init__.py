"""megabatch inside other libraries' trainers: one module for each library, imported by its name.

    from megabatch.integrations.sentence_transformers import MegabatchRankingLoss

A module needs its library and torch; nothing else in megabatch imports it.
"""
