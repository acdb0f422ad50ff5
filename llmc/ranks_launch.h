// ranks_launch.h - starts the ranks of --devices on this machine with MPI's launcher, waits for them, and
// makes the program that a user started behave as one process: signals reach all ranks, the first rank's
// output is its output, and if a rank fails, the user sees one line and one exit code.
//
// The starter is the process that the user has started. It starts mpirun, MPI's launcher, and mpirun starts
// the ranks. The starter and the ranks share a page of memory (RunPage). The ranks write there which process
// is which rank, where the run is, and which files MPI has in /dev/shm. If a rank ends without a message, the
// starter uses the page to say which rank was lost, and where.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "llmc/ranks.h"

// ---- in the starter

// Starts `count` ranks of this program with the same arguments, and returns its exit code when all have
// ended. Fails if they cannot be started, or if one of them ended without a message.
int launch_ranks(int count, char** argv);

// ---- in a rank

// In a rank: connects stdout and stderr to those of the starter, if there is one. Only the first rank prints;
// of the others only errors are shown, which go to the stream that this returns.
FILE* open_rank_streams(const Rank& rank);
// In a rank: connects it to the others. If some are lost later, the first that notices prints a line on
// `errors` and ends all. Fails as connect_ranks() does.
std::unique_ptr<RankEngine> begin_rank(const Rank& rank, FILE* errors);
// In the first rank: says where the run is.
void tell_starter_where(const std::string& where);
// In a rank that ends by itself and not well: tells the starter its exit code, which MPI's
// launchers do not pass on reliably. From then on it gets no signals from that process.
void tell_starter_exit_code(int code);
