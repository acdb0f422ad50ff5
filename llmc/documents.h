// documents.h - where the documents of a packed batch are: examples that lie one after the other in a row of
// it, each with positions of its own and seen by nobody else.
#pragma once

#include "llmc/tensor.h"

// Of a batch of B sequences of T tokens. All absent where each sequence is one document.
struct Documents {
    Tensor<int> positions;         // (B, T): how many tokens of its document come before a token
    Tensor<int> ends;              // (B, T): the place in the sequence after the document's last token
    Tensor<int> rows_by_position;  // (B * T), and
    Tensor<int> position_starts;   // (T + 1): group_tokens() of the positions
};
