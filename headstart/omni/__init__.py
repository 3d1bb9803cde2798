"""Pipelines of models: stages that pass tensors to one another, and the cache of these tensors.

Glossary:
    stage           one model, or one function, of a pipeline
    output          a named tensor that a stage passes to later stages
    row             one token's part of an output; `frames(n)` outputs have n rows per token
    watermark       the number of a request's tokens whose rows were passed to later stages
    condition       a stage's input besides token ids: rows of an earlier stage
"""
