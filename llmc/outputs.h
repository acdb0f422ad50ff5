// outputs.h - checks what a run writes: its folder of saves must be its own, and no output may be an input,
// another output, or a part of a save or of a model.
#pragma once

#include <string>
#include <vector>

// A file that an option tells the run to write.
struct Output {
    const char* option;
    std::string path;
    const char* begins;  // how such a file begins; "" if its reader checks that
    enum Kind {
        Written,   // line by line or at once; may be a FIFO or a device
        Replaced,  // by renaming another file to it
        InFolder,  // whose folder is made if it is missing
        Folder     // a folder that must not exist yet
    } kind = Written;
};

// Fails unless the file can be written. If it exists, it must be of the same kind.
void check_output_file(const Output& o);

// Fails unless each file or folder can be written, OUT and all of these differ, and none of them is part of a
// model or save in the folders `inputs` or of the saves in OUT. Empty paths are skipped.
void check_outputs(const std::vector<Output>& files, const std::string& out,
                   const std::vector<std::string>& inputs);
