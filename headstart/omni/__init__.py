"""Pipelines of models: stages that pass tensors to one another, and the cache of these tensors.

Glossary:
    stage           one model, or one function, of a pipeline
    output          a named tensor that a stage passes to later stages
    row             one entry of an output's first axis; belongs to one token
    watermark       the number of a request's tokens whose rows were passed to later stages
    feed            the inputs of one request to one stage
    thinker         the stage that generates the text of the answer
    talker          the stage that generates codes of speech from the thinker's rows
    vocoder         the stage that makes the waveform from the codes
"""
