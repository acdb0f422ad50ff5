// gpt2_config.h - the configuration of a GPT-2, for tests of what works with any model.
#pragma once

#include "llmc/families.h"

inline ModelConfig gpt2_config(int vocabulary, int positions, int layers, int heads, int channels) {
    ModelConfig c;
    c.family = &kGpt2;
    c.vocabulary = vocabulary;
    c.positions = positions;
    c.layers = layers;
    c.channels = channels;
    c.heads = heads;
    kGpt2.begin(c);
    return c;
}
