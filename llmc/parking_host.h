// parking_host.h - inputs of blocks parked in pinned host memory beside a GPU, copied on a stream of its own.
#pragma once

#include "llmc/parking.h"

class HostParking : public ParkingPlace {
  public:
    // Takes the memory for so many inputs.
    HostParking(int layers, size_t input_bytes)
        : bytes_(input_bytes), memory_(static_cast<size_t>(layers) * input_bytes) {}

    void store(int layer, const char* slot, Stream stream) override { copy(at(layer), slot, stream); }
    void load(int layer, char* slot, Stream stream) override { copy(slot, at(layer), stream); }
    void join(Stream stream) override { done_.block(stream); }

  private:
    char* at(int layer) const { return memory_.data() + static_cast<size_t>(layer) * bytes_; }
    void copy(char* to, const char* from, Stream stream) {
        before_.record(stream);
        before_.block(copies_.get());
        copy_async(to, from, bytes_, copies_.get());
        done_.record(copies_.get());
    }

    const size_t bytes_;
    PinnedBuffer memory_;
    OwnStream copies_;
    Event before_, done_;
};
