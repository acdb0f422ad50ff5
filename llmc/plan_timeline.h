// plan_timeline.h - the bytes that live after each take, release and operation of a training step, and the
// transfers beside them, as JSON.
#pragma once

#include "llmc/plan_report.h"

// What the page of --report shows of a step's memory: the bytes of each kind from moment to moment, and the
// table of buffers with the moments at which each begins and ceases to live. In a long step several events
// are one moment, which has the bytes of the event with the most.
nlohmann::ordered_json timeline_page(const MemoryReport& report, const Plan& update, const Rates& rates);

// Writes the timeline, with one operation per line, and one transfer per line if there are any. Fails, naming
// --timeline, if the file cannot be written.
void write_timeline(const std::string& path, const MemoryReport& report, const Plan& update,
                    const Rates& rates);
